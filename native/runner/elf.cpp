#include "elf.h"
#include <elf.h>

namespace bitport::runner {
namespace {

#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
#else
#error "name this machine's number in ELF headers"
#endif

const char* name_of(uint16_t machine) {
  switch (machine) {
    case EM_X86_64: return "x86-64";
    case EM_AARCH64: return "aarch64";
    case EM_RISCV: return "riscv";
    case EM_386: return "x86 of 32 bits";
    default: return "another machine";
  }
}

std::string string_at(Bytes strings, uint64_t offset) {
  const Bytes rest = strings.part(offset, strings.size - std::min(offset, strings.size));
  const void* end = std::memchr(rest.data, 0, rest.size);
  if (!end) fail("a name has no end");
  return std::string(reinterpret_cast<const char*>(rest.data));
}

// A table of `count` records; `bytes` is the record size given in the file.
template <typename Record>
Bytes table(Bytes file, uint64_t offset, uint64_t count, uint64_t bytes) {
  if (bytes != sizeof(Record) || count > file.size / sizeof(Record)) fail("a table of it is damaged");
  return file.part(offset, count * sizeof(Record));
}

void check_segments(Bytes file, const Elf64_Ehdr& header) {
  const Bytes segments = table<Elf64_Phdr>(file, header.e_phoff, header.e_phnum, header.e_phentsize);
  bool code = false;
  for (uint64_t at = 0; at < segments.size; at += sizeof(Elf64_Phdr)) {
    const auto segment = segments.number<Elf64_Phdr>(at);
    if (segment.p_type == PT_NULL) continue;
    file.part(segment.p_offset, segment.p_filesz);
    code |= segment.p_type == PT_LOAD && segment.p_flags & PF_X;
    if (segment.p_type == PT_LOAD && segment.p_memsz < segment.p_filesz) fail("a segment of it is damaged");
  }
  if (!code) fail("it holds no code");
}

void read_symbols(Bytes file, const Elf64_Ehdr& header, Library& found) {
  const Bytes sections = table<Elf64_Shdr>(file, header.e_shoff, header.e_shnum, header.e_shentsize);
  for (uint64_t at = 0; at < sections.size; at += sizeof(Elf64_Shdr)) {
    const auto section = sections.number<Elf64_Shdr>(at);
    if (section.sh_type != SHT_DYNSYM) continue;
    const auto named = sections.number<Elf64_Shdr>(uint64_t(section.sh_link) * sizeof(Elf64_Shdr));
    const Bytes strings = file.part(named.sh_offset, named.sh_size);
    const Bytes symbols = table<Elf64_Sym>(file, section.sh_offset, section.sh_size / sizeof(Elf64_Sym), section.sh_entsize);
    for (uint64_t each = sizeof(Elf64_Sym); each < symbols.size; each += sizeof(Elf64_Sym)) {
      const auto symbol = symbols.number<Elf64_Sym>(each);
      (symbol.st_shndx == SHN_UNDEF ? found.wants : found.offers).insert(string_at(strings, symbol.st_name));
    }
  }
}

}  // namespace

Library library_of(Bytes file, const std::string& where) {
  return about(where, [&] {
    const auto header = file.number<Elf64_Ehdr>(0);
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG)) fail("no ELF file");
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB) fail("not of 64 bits, little endian");
    if (header.e_type != ET_DYN) fail("no shared library");
    if (header.e_machine != kMachine)
      fail("compiled for ", name_of(header.e_machine), "; this machine is ", name_of(kMachine), ": export the model for it");
    check_segments(file, header);
    Library found;
    read_symbols(file, header, found);
    return found;
  });
}

}  // namespace bitport::runner
