#include "safetensors.h"
#include <fstream>
#include "json.h"

namespace bitport::runner {

Tensors read_tensors(Bytes file, const std::shared_ptr<const void>& owner, const std::string& where) {
  return about(where, [&] {
    const auto header_bytes = file.number<uint64_t>(0);
    const Bytes header = file.part(8, header_bytes), data = file.part(8 + header_bytes, file.size - 8 - header_bytes);
    const Json entries = Json::parse(header.text(), "the header");
    Tensors made;
    for (const auto& [name, entry] : entries.object("the header"))
      about(name, [&, &name = name, &entry = entry] {
        if (name == "__metadata__") {
          for (const auto& [key, value] : entry.object("it")) value.text(key);   // nothing else is allowed there
          return;
        }
        const Sizes range = entry["data_offsets"].sizes("data_offsets");
        if (range.size() != 2 || range[1] < range[0]) fail("data_offsets are no range");
        const Bytes bytes = data.part(uint64_t(range[0]), uint64_t(range[1] - range[0]));
        const Type& type = type_of(entry["dtype"].text("dtype"));
        made.emplace(name, Tensor::over(type, entry["shape"].sizes("shape"), bytes, owner));
      });
    return made;
  });
}

Tensors read_tensors(const std::string& path) {
  const auto file = std::make_shared<const MappedFile>(path);
  return read_tensors(file->bytes(), file, path);
}

void write_tensors(const std::string& path, const Tensors& tensors) {
  std::string header = "{";
  int64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t end = at + tensor.count() * tensor.type->bytes;
    header += (header.size() > 1 ? "," : "") + json_text(name) + ":{\"dtype\":\"" + tensor.type->name + "\",\"shape\":[";
    for (size_t i = 0; i < tensor.sizes.size(); ++i) header += (i ? "," : "") + std::to_string(tensor.sizes[i]);
    header += "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(end) + "]}";
    at = end;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::ofstream file(path, std::ios::binary);
  const uint64_t bytes = header.size();
  file.write(reinterpret_cast<const char*>(&bytes), sizeof bytes) << header;
  for (const auto& [name, tensor] : tensors)
    file.write(static_cast<const char*>(tensor.dense().data()), tensor.count() * tensor.type->bytes);
  if (!file.flush()) fail(path, ": cannot be written");
}

}  // namespace bitport::runner
