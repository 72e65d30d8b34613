// From an address of code to the line of a kernel source, read from this library's own DWARF 4 line table when an error is reported.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>

#include "worker.hpp"

#if defined(__linux__)
#include <elf.h>
#include <link.h>
#endif

namespace lily_sim {
namespace {

struct Library {
  uintptr_t base = 0, begin = 0, end = 0;
  std::string path;
};

#if defined(__linux__)
int visit(dl_phdr_info* info, size_t, void* data) {
  auto* library = static_cast<Library*>(data);
  const auto self = reinterpret_cast<uintptr_t>(&visit);
  uintptr_t begin = ~uintptr_t(0), end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    begin = at < begin ? at : begin;
    end = at + info->dlpi_phdr[i].p_memsz > end ? at + info->dlpi_phdr[i].p_memsz : end;
  }
  if (self < begin || self >= end) return 0;
  *library = {info->dlpi_addr, begin, end, info->dlpi_name ? info->dlpi_name : ""};
  return 1;
}
#endif

const Library& library() {
  static const Library found = [] {
    Library l;
#if defined(__linux__)
    dl_iterate_phdr(visit, &l);
#endif
    return l;
  }();
  return found;
}

#if defined(__linux__)
struct Reader {
  const unsigned char *p, *end;
  bool more() const { return p < end; }
  template <class T>
  T take() {
    T v{};
    if (size_t(end - p) >= sizeof v)
      std::memcpy(&v, p, sizeof v), p += sizeof v;
    else
      p = end;
    return v;
  }
  uint64_t unsigned_leb() {
    uint64_t v = 0;
    for (unsigned shift = 0; p < end; shift += 7) {
      const unsigned char b = *p++;
      v |= uint64_t(b & 127) << shift;
      if (!(b & 128)) break;
    }
    return v;
  }
  int64_t signed_leb() {
    int64_t v = 0;
    unsigned shift = 0;
    while (p < end) {
      const unsigned char b = *p++;
      v |= int64_t(b & 127) << shift;
      shift += 7;
      if (!(b & 128)) {
        if (shift < 64 && (b & 64)) v |= -(int64_t(1) << shift);
        break;
      }
    }
    return v;
  }
  std::string text() {
    std::string s;
    while (p < end && *p) s += char(*p++);
    if (p < end) p++;
    return s;
  }
};

// One unit of the line table; the row at or before `target`, when its sequence covers it.
std::string search_unit(Reader unit, uint64_t target) {
  const auto version = unit.take<uint16_t>();
  if (version < 2 || version > 4) return "";
  const auto header_bytes = unit.take<uint32_t>();
  Reader program{unit.p + header_bytes, unit.end};
  const unsigned minimum = unit.take<uint8_t>();
  if (version >= 4) unit.take<uint8_t>();
  unit.take<uint8_t>();
  const int line_base = unit.take<int8_t>();
  const unsigned line_range = unit.take<uint8_t>();
  const unsigned opcode_base = unit.take<uint8_t>();
  std::vector<unsigned> lengths(1, 0);
  for (unsigned i = 1; i < opcode_base; i++) lengths.push_back(unit.take<uint8_t>());
  std::vector<std::string> files(1), folders(1);
  for (std::string folder = unit.text(); !folder.empty(); folder = unit.text()) folders.push_back(folder);
  while (unit.more()) {
    const std::string name = unit.text();
    if (name.empty()) break;
    const uint64_t folder = unit.unsigned_leb();
    for (int k = 0; k < 2; k++) unit.unsigned_leb();
    const bool joined = folder > 0 && folder < folders.size() && name[0] != '/';
    files.push_back(joined ? folders[folder] + "/" + name : name);
  }
  if (!line_range) return "";
  struct Row {
    uint64_t address = 0, file = 1;
    int64_t line = 1;
  } now, previous;
  bool in_sequence = false;
  auto row = [&](bool last) -> bool {
    const bool hit = in_sequence && previous.address <= target && target < now.address;
    if (!hit) previous = now;
    in_sequence = !last;
    return hit;
  };
  auto answer = [&] {
    const std::string file = previous.file < files.size() ? files[previous.file] : "";
    return file + ":" + std::to_string(previous.line);
  };
  while (program.more()) {
    const unsigned op = program.take<uint8_t>();
    if (op >= opcode_base) {
      now.address += uint64_t((op - opcode_base) / line_range) * minimum;
      now.line += line_base + int((op - opcode_base) % line_range);
      if (row(false)) return answer();
    } else if (op == 0) {
      const uint64_t bytes = program.unsigned_leb();
      Reader extended{program.p, program.p + bytes};
      program.p += bytes;
      const unsigned what = extended.take<uint8_t>();
      if (what == 1) {
        if (row(true)) return answer();
        now = Row{};
      } else if (what == 2) {
        now.address = extended.take<uint64_t>();
      }
    } else if (op == 1) {
      if (row(false)) return answer();
    } else if (op == 2) {
      now.address += program.unsigned_leb() * minimum;
    } else if (op == 3) {
      now.line += program.signed_leb();
    } else if (op == 4) {
      now.file = program.unsigned_leb();
    } else if (op == 8) {
      now.address += uint64_t((255 - opcode_base) / line_range) * minimum;
    } else if (op == 9) {
      now.address += program.take<uint16_t>();
    } else {
      for (unsigned k = 0; k < lengths[op]; k++) program.unsigned_leb();
    }
  }
  return "";
}

const std::vector<unsigned char>& line_table() {
  static const std::vector<unsigned char> table = [] {
    std::vector<unsigned char> found;
    std::ifstream file(library().path, std::ios::binary);
    const std::vector<char> all((std::istreambuf_iterator<char>(file)), {});
    if (all.size() < sizeof(ElfW(Ehdr))) return found;
    const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(all.data());
    const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(all.data() + header->e_shoff);
    const char* names = all.data() + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
      if (std::strcmp(names + sections[i].sh_name, ".debug_line") != 0 || (sections[i].sh_flags & SHF_COMPRESSED)) continue;
      const auto* start = reinterpret_cast<const unsigned char*>(all.data()) + sections[i].sh_offset;
      found.assign(start, start + sections[i].sh_size);
    }
    return found;
  }();
  return table;
}
#endif

}  // namespace

bool in_library(const void* address) {
  const auto a = reinterpret_cast<uintptr_t>(address);
#if defined(__linux__)
  return a >= library().begin && a < library().end;
#else
  Dl_info here, there;
  return dladdr(reinterpret_cast<const void*>(&in_library), &here) && dladdr(address, &there) && here.dli_fbase == there.dli_fbase && a;
#endif
}

std::string source_line(const void* site) {
#if defined(__linux__)
  if (!site) return "";
  const uint64_t target = reinterpret_cast<uintptr_t>(site) - 1 - library().base;
  const auto& table = line_table();
  Reader all{table.data(), table.data() + table.size()};
  while (all.more()) {
    const auto bytes = all.take<uint32_t>();
    if (bytes >= 0xFFFFFFF0u || bytes > size_t(all.end - all.p)) break;
    const std::string found = search_unit({all.p, all.p + bytes}, target);
    if (!found.empty()) return found;
    all.p += bytes;
  }
#else
  (void)site;
#endif
  return "";
}

}  // namespace lily_sim
