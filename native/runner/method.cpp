#include "method.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>
#include <utility>
#include "numbers.h"
#include "torch.h"

namespace bitport::runner {
namespace {

// The dynamic loader only accepts files: use an anonymous one, which needs no folder and leaves nothing behind.
class LoadedLibrary {
 public:
  LoadedLibrary(Bytes code, const std::string& name) : file_(memfd_create(name.c_str(), MFD_CLOEXEC)) {
    if (file_ < 0) fail(name, ": no file in memory: ", std::strerror(errno));
    for (uint64_t at = 0; at < code.size;) {
      const ssize_t wrote = write(file_, code.data + at, code.size - at);
      if (wrote <= 0) { close(file_); fail(name, ": its code does not fit into memory: ", std::strerror(errno)); }
      at += uint64_t(wrote);
    }
    library_ = dlopen(("/proc/self/fd/" + std::to_string(file_)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) {
      const std::string reason = dlerror();
      close(file_);
      fail(name, ": its code cannot be loaded (is torch as new as the one that exported it?): ", reason);
    }
  }
  ~LoadedLibrary() {
    dlclose(library_);
    close(file_);
  }
  LoadedLibrary(const LoadedLibrary&) = delete;
  LoadedLibrary& operator=(const LoadedLibrary&) = delete;

  void* handle() const { return library_; }

 private:
  int file_;
  void* library_ = nullptr;
};

// Deletes the tensors that nobody has taken out: such handles are null.
struct Handles {
  const Torch& torch;
  std::vector<TensorHandle> all;
  ~Handles() {
    for (const TensorHandle handle : all)
      if (handle) torch.aoti_torch_delete_tensor_object(handle);
  }
};

bool within(const void* address, const Tensor& tensor) {
  const auto at = reinterpret_cast<uintptr_t>(address), begin = reinterpret_cast<uintptr_t>(tensor.data());
  return at >= begin && at < begin + uintptr_t(tensor.count() * tensor.type->bytes);
}

}  // namespace

struct Method::State : MethodSource {
  const Torch& torch;
  LoadedLibrary library;
  Code code_of_library;
  Container container = nullptr;
  std::vector<TensorHandle> handles;   // of the constants
  size_t input_count = 0, output_count = 0;

  State(MethodSource source, const std::string& torch_folder)
      : MethodSource(std::move(source)), torch(Torch::loaded(torch_folder)), library(code, name),
        code_of_library(library.handle(), name) {
    try {
      open();
    } catch (...) {
      release();
      throw;
    }
  }
  ~State() { release(); }

  void open() {
    const Code& c = code_of_library;
    c.check(c.AOTInductorModelContainerCreateWithDevice(&container, 1, "cpu", nullptr), name + " cannot be loaded");
    c.check(c.AOTInductorModelContainerGetNumInputs(container, &input_count), name);
    c.check(c.AOTInductorModelContainerGetNumOutputs(container, &output_count), name);
    if (!inputs.empty() && inputs.size() != input_count)
      fail(name, ": the code takes ", input_count, " inputs, the manifest says ", inputs.size());
    if (!outputs.empty() && outputs.size() != output_count)
      fail(name, ": the code gives ", output_count, " outputs, the manifest says ", outputs.size());
    if (!constants.empty()) bind();
  }

  void bind() {
    const Code& c = code_of_library;
    size_t count = 0;
    c.check(c.AOTInductorModelContainerGetNumConstants(container, &count), name);
    std::vector<NamedHandle> pairs;
    for (size_t i = 0; i < count; ++i) {
      const char *inner = nullptr, *full = nullptr;
      bool folded = false;
      int32_t dtype = 0;
      size_t bytes = 0;
      c.check(c.AOTInductorModelContainerGetConstantFromFolded(container, i, &folded), name);
      if (folded) fail(name, ": it computes constants when it is loaded, which this runner does not; export it without");
      c.check(c.AOTInductorModelContainerGetConstantName(container, i, &inner), name);
      c.check(c.AOTInductorModelContainerGetConstantOriginalFQN(container, i, &full), name);
      c.check(c.AOTInductorModelContainerGetConstantDtype(container, i, &dtype), name);
      c.check(c.AOTInductorModelContainerGetConstantDataSize(container, i, &bytes), name);
      const auto found = constants.find(full);
      if (found == constants.end()) fail(name, ": the weights lack ", full);
      Tensor& tensor = found->second;
      // The code knows the size of a constant's storage at export, which other constants may have shared.
      if (dtype != torch.dtype_of(*tensor.type) || bytes < size_t(tensor.count() * tensor.type->bytes))
        fail(name, ": the weights hold ", full, " as ", text_of(*tensor.type, tensor.sizes),
             ", which the code takes for something else: they do not belong together");
      if (!tensor.is_aligned()) tensor = copy_of(tensor);
      handles.push_back(torch.handle_of(tensor));
      pairs.push_back({inner, handles.back()});
    }
    c.check(c.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(container, pairs.data(), pairs.size(), false, true),
            name + " does not take its weights");
  }

  void release() {
    if (container) code_of_library.AOTInductorModelContainerDelete(container);
    for (const TensorHandle handle : handles) torch.aoti_torch_delete_tensor_object(handle);
  }
};

void load_torch(const std::string& folder) { Torch::loaded(folder); }

Method::Method(MethodSource source, const std::string& torch_folder)
    : state_(std::make_shared<const State>(std::move(source), torch_folder)) {}

const std::string& Method::name() const { return state_->name; }
const std::vector<Argument>& Method::inputs() const { return state_->inputs; }
const std::vector<Argument>& Method::outputs() const { return state_->outputs; }
size_t Method::input_count() const { return state_->input_count; }

std::vector<Tensor> Method::run(const std::vector<Tensor>& inputs) const {
  const State& state = *state_;
  if (inputs.size() != state.input_count) fail(name(), " takes ", state.input_count, " inputs, not ", inputs.size());
  Named named;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!state.inputs.empty()) state.inputs[i].check(*inputs[i].type, inputs[i].sizes, state.ranges, named);
    if (!inputs[i].is_dense()) fail(name(), ": input ", i, " is not dense");
    if (!inputs[i].is_aligned()) fail(name(), ": input ", i, " begins between two elements; give a copy");
  }
  Handles given{state.torch, std::vector<TensorHandle>(inputs.size())};
  Handles made{state.torch, std::vector<TensorHandle>(state.output_count)};
  for (size_t i = 0; i < inputs.size(); ++i) given.all[i] = state.torch.handle_of(inputs[i]);
  const Code& c = state.code_of_library;
  // It takes the inputs out, unless it fails before.
  c.check(c.AOTInductorModelContainerRun(state.container, given.all.data(), given.all.size(), made.all.data(), made.all.size(),
                                         nullptr, nullptr),
          name());
  std::vector<Tensor> outputs;
  for (TensorHandle& handle : made.all) {
    Tensor output = state.torch.tensor_of(std::exchange(handle, nullptr));
    for (const Tensor& input : inputs)   // keeps an input that it aliases alive; every output keeps the method alive
      if (within(output.data(), input)) output.memory = {input.memory, output.data()};
    const auto keep = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const State>>>(output.memory, state_);
    output.memory = {keep, output.data()};
    outputs.push_back(std::move(output));
  }
  return outputs;
}

}  // namespace bitport::runner
