#include "program.h"
#include <sys/mman.h>
#include "elf.h"

namespace bitport::runner {
namespace {

constexpr char kManifest[] = "extra/bitport.json", kCode[] = "data/aotinductor/", kLibrary[] = ".so";
constexpr char kExecutor[] = "aoti_torch_proxy_executor_call_function";
constexpr char kMain[] = "AOTInductorModelContainerCreateWithDevice";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && !text.compare(text.size() - end.size(), end.size(), end);
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == path.npos ? "" : path.substr(0, slash + 1);
}

// Reads the pages of a tensor, in one call if the system supports it.
void make_resident(const Tensor& tensor) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data()) & ~(kPage - 1);
  const auto end = reinterpret_cast<uintptr_t>(tensor.data()) + uintptr_t(tensor.count() * tensor.type->bytes);
#ifdef MADV_POPULATE_READ
  if (!madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ)) return;
#endif
  uint8_t sum = 0;
  for (uintptr_t at = reinterpret_cast<uintptr_t>(tensor.data()); at < end; at += kPage) sum ^= *reinterpret_cast<const uint8_t*>(at);
  volatile uint8_t read = sum;
  (void)read;
}

}  // namespace

Program::Program(const std::string& path, Options options)
    : path_(path), options_(std::move(options)), file_(std::make_shared<const MappedFile>(path)), zip_(file_->bytes(), path) {
  const auto& entries = zip_.entries();
  root_ = entries.empty() ? "" : entries.begin()->first.substr(0, entries.begin()->first.find('/') + 1);
  if (entries.count(entry(kManifest))) {
    manifest_ = Manifest::parse(zip_.checked(entry(kManifest)).text(), path + ": " + kManifest);
    manifest_->check_machine();
  }
  find_methods();
  find_weights();
  for (const auto& [name, each] : code_)
    if (zip_.entries().find(each) == zip_.entries().end()) fail(path_, ": the code of ", name, " is missing");
}

void Program::find_methods() {
  if (manifest_) {
    for (const auto& [name, method] : manifest_->methods) code_[name] = entry(method.code.entry);
    return;
  }
  const std::string folder = entry(kCode);
  for (const auto& [name, each] : zip_.entries()) {
    if (name.compare(0, folder.size(), folder) || !ends_with(name, kLibrary)) continue;
    const std::string method = name.substr(folder.size(), name.find('/', folder.size()) - folder.size());
    if (!code_.emplace(method, name).second) fail(path_, ": ", method, " has two libraries");
  }
  if (code_.empty()) fail(path_, ": no package: it holds neither ", kManifest, " nor ", kCode, "METHOD/*", kLibrary);
}

void Program::find_weights() {
  const bool own = !options_.weights.empty();
  if (!own && (!manifest_ || (manifest_->weights.entry.empty() && manifest_->weights_file.empty()))) return;
  const bool beside = own || manifest_->weights.entry.empty();
  const std::string where = own ? options_.weights : beside ? folder_of(path_) + manifest_->weights_file : path_ + ": its weights";
  const auto file = beside ? std::make_shared<const MappedFile>(where) : file_;
  const auto found = beside ? zip_.entries().end() : zip_.entries().find(entry(manifest_->weights.entry));
  if (!beside && found == zip_.entries().end()) fail(path_, ": ", manifest_->weights.entry, " is missing");
  const Bytes bytes = beside ? file->bytes() : found->second.bytes;
  if (manifest_ && bytes.size != manifest_->weights.size)
    fail(where, ": ", bytes.size, " bytes; ", manifest_->weights.size, " were exported");
  if (manifest_ && beside)   // constants are located by offset only
    about(where, [&] {
      if (crc32(bytes.part(0, manifest_->header.size)) != manifest_->header.crc)
        fail("holds other tensors, or in other places, than ", path_, " was exported with");
    });
  if (manifest_ && !own && options_.verify && crc32(bytes) != manifest_->weights.crc)
    fail(where, ": damaged: the checksum is wrong");
  weights_ = Stored{file, bytes, where};
}

std::vector<std::string> Program::methods() const {
  std::vector<std::string> names;
  for (const auto& [name, each] : code_) names.push_back(name);
  return names;
}

Bytes Program::code_of(const std::string& name) const {
  const std::string& where = code_.at(name);
  const Bytes code = zip_.checked(where);
  if (manifest_) {
    const Part& part = manifest_->methods.at(name).code;
    if (code.size != part.size || zip_.entries().at(where).crc != part.crc)
      fail(path_, ": ", where, " is not what was exported: its size or checksum differs");
  }
  const Library library = library_of(code, path_ + ": " + where);
  if (!library.offers.count(kMain)) fail(path_, ": ", where, " is no library of AOTInductor");
  if (library.wants.count(kExecutor))
    fail(path_, ": ", name, " calls an operator that has no C function, which needs torch's own loader; export it with bitport");
  return code;
}

Tensors Program::constants_of(const std::string& name) const {
  if (!manifest_) return weights_ ? read_tensors(weights_->bytes, weights_->file, weights_->where) : Tensors();
  Tensors made;
  const MethodManifest& method = manifest_->methods.at(name);
  const std::string where = path_ + ": " + method.constants;
  const Constants listed = read_constants(zip_.checked(entry(method.constants)).text(), where);
  if (listed.size() != method.constant_count)
    fail(where, ": ", listed.size(), " constants; ", method.constant_count, " were exported");
  if (!listed.empty() && !weights_) fail(where, ": constants, and the package names no weights");
  for (const auto& [constant, wanted] : listed)
    about(where + ": " + constant, [&, &constant = constant, &wanted = wanted] {
      const int64_t each = wanted.type->bytes;
      if (wanted.at % uint64_t(each)) fail("at ", wanted.at, ", which is no place for ", wanted.type->name);
      const Bytes bytes = weights_->bytes.part(wanted.at, uint64_t(count_of(wanted.sizes, each) * each));
      made.emplace(constant, Tensor::over(*wanted.type, wanted.sizes, bytes, weights_->file));
    });
  return made;
}

void Program::check() {
  for (const std::string& name : methods()) {
    code_of(name);
    constants_of(name);
    example(name);
  }
}

const Method& Program::load(const std::string& name) {
  if (const auto known = loaded_.find(name); known != loaded_.end()) return known->second;
  if (!code_.count(name)) fail(path_, ": no method ", name, "; it has ", joined(methods()));
  MethodSource source{name, code_of(name), constants_of(name), {}, {}, {}};
  if (options_.resident)
    for (const auto& [constant, tensor] : source.constants) make_resident(tensor);
  if (manifest_) {
    const MethodManifest& method = manifest_->methods.at(name);
    source.inputs = method.inputs, source.outputs = method.outputs, source.ranges = manifest_->ranges;
  }
  return loaded_.emplace(name, Method(std::move(source), options_.torch)).first->second;
}

Tensors Program::example(const std::string& name) const {
  if (!manifest_ || !manifest_->methods.at(name).example) return {};
  const std::string where = entry(manifest_->methods.at(name).example->entry);
  return read_tensors(zip_.checked(where), file_, path_ + ": " + where);
}

}  // namespace bitport::runner
