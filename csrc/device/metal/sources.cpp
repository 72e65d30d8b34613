#include "device/metal/sources.hpp"

#include <algorithm>
#include <cctype>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "base/error.hpp"

namespace lily::metal {
namespace {

namespace fs = std::filesystem;

std::mutex root_mutex;
std::string chosen_root;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) throw DeviceError("the kernel source " + path.string() + " cannot be read; reinstall lily-inference");
  return text.str();
}

std::string trimmed(const std::string& s) {
  size_t begin = s.find_first_not_of(" \t"), end = s.find_last_not_of(" \t\r;");
  return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}

// What stands between `open` and `close` at the start of a line, if it begins with `word`.
bool statement(const std::string& line, const std::string& word, std::string& inside) {
  if (line.compare(0, word.size(), word) != 0) return false;
  size_t end = line.rfind(')');
  if (end == std::string::npos) return false;
  inside = line.substr(word.size(), end - word.size());
  return true;
}

struct Loader {
  fs::path root;
  KernelSource& out;
  std::set<fs::path> seen;

  // LILY_INSTANTIATE(host name, function, arguments): a template gets its host name here, a plain kernel has it already.
  std::string instantiate(const std::string& inside) {
    size_t first = inside.find(','), second = first == std::string::npos ? first : inside.find(',', first + 1);
    if (first == std::string::npos) throw DeviceError(out.name + ": LILY_INSTANTIATE(" + inside + ") names no function");
    const std::string host = trimmed(inside.substr(0, first));
    out.functions.push_back(host);
    if (second == std::string::npos) return "";
    const std::string function = trimmed(inside.substr(first + 1, second - first - 1)) + "<" + trimmed(inside.substr(second + 1)) + ">";
    return "template [[host_name(\"" + host + "\")]] [[kernel]] decltype(" + function + ") " + function + ";";
  }

  // constant uint NAME [[function_constant(3)]];
  void constant(const std::string& line) {
    size_t at = line.find("[[function_constant(");
    if (at == std::string::npos || line.compare(0, 9, "constant ") != 0) return;
    const std::string type = line.substr(9, line.find(' ', 9) - 9);
    const uint32_t index = uint32_t(std::stoul(line.substr(at + 20)));
    if (type == "bool") out.constants[index] = ConstantType::boolean;
    else if (type == "uint") out.constants[index] = ConstantType::unsigned_int;
    else if (type == "int") out.constants[index] = ConstantType::signed_int;
    else if (type == "float") out.constants[index] = ConstantType::real;
    else throw DeviceError(out.name + ": a function constant of type " + type);
  }

  void add(const fs::path& path, const std::string& shown) {
    seen.insert(fs::weakly_canonical(path));
    std::istringstream text(read(path));
    std::string line;
    out.text += "#line 1 \"" + shown + "\"\n";
    for (int number = 1; std::getline(text, line); number++) {
      std::string inside;
      if (line.compare(0, 10, "#include \"") == 0) {
        const std::string name = line.substr(10, line.find('"', 10) - 10);
        fs::path header = path.parent_path() / name;
        if (!fs::exists(header)) header = root / "include" / name;
        if (!seen.count(fs::weakly_canonical(header))) {
          add(header, "metal/" + fs::relative(header, root).generic_string());
          out.text += "#line " + std::to_string(number + 1) + " \"" + shown + "\"\n";
        } else {
          out.text += "\n";
        }
        continue;
      }
      if (line.find("MetalPerformancePrimitives") != std::string::npos) out.tensor = true;
      if (statement(line, "LILY_INSTANTIATE(", inside)) line = instantiate(inside);
      constant(line);
      out.text += line + "\n";
    }
  }
};

}  // namespace

void set_kernel_root(const std::string& folder) {
  std::lock_guard<std::mutex> lock(root_mutex);
  chosen_root = folder;
}

std::string kernel_root() {
  std::lock_guard<std::mutex> lock(root_mutex);
  fs::path root = chosen_root;
  Dl_info info{};
  if (root.empty() && dladdr(reinterpret_cast<const void*>(&set_kernel_root), &info) && info.dli_fname) root = fs::path(info.dli_fname).parent_path() / "metal";
  std::error_code ignored;
  if (!fs::exists(root / "include" / "args.h", ignored)) throw DeviceError("the kernel sources are missing in " + root.string() + "; reinstall lily-inference");
  return root.string();
}

std::vector<KernelSource> load_sources(bool float32) {
  const fs::path root = kernel_root();
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(root))
    if (entry.path().extension() == ".metal") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<KernelSource> sources;
  for (const fs::path& file : files) {
    KernelSource s;
    s.name = "metal/" + fs::relative(file, root).generic_string();
    if (float32) s.text = "#define LILY_STORAGE_FLOAT32 1\n";
    Loader{root, s, {}}.add(file, s.name);
    sources.push_back(std::move(s));
  }
  return sources;
}

}  // namespace lily::metal
