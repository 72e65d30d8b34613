#include "kernel_case.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"

namespace lily::test {
namespace {

template <class T>
Operand operand(Type type, Role role, const std::vector<T>& values) {
  Operand o{role, type, std::vector<uint8_t>(values.size() * sizeof(T))};
  if (!values.empty()) std::memcpy(o.bytes.data(), values.data(), o.bytes.size());
  return o;
}

Floats nans(size_t n) { return Floats(n, std::numeric_limits<float>::quiet_NaN()); }

// Memory of exactly `bytes` bytes that ends at the end of a heap block or of a page.
class ExactMemory {
 public:
  ExactMemory(size_t bytes, size_t shift, Placement placement) {
    if (placement == Placement::heap) {
      block_ = std::make_unique<uint8_t[]>(bytes + shift);
      data_ = block_.get() + shift;
      return;
    }
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    mapped_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped_ != MAP_FAILED);
    uint8_t* guard = static_cast<uint8_t*>(mapped_) + size_ - page;
    CHECK(mprotect(guard, page, PROT_NONE) == 0);
    data_ = guard - bytes;
  }
  ExactMemory(ExactMemory&& other) noexcept : block_(std::move(other.block_)), mapped_(other.mapped_), size_(other.size_), data_(other.data_) { other.mapped_ = nullptr; }
  ~ExactMemory() {
    if (mapped_) munmap(mapped_, size_);
  }
  uint8_t* data() const { return data_; }

 private:
  std::unique_ptr<uint8_t[]> block_;
  void* mapped_ = nullptr;
  size_t size_ = 0;
  uint8_t* data_ = nullptr;
};

std::vector<uint8_t> stored(const Operand& o, DType storage) {
  if (o.type != Type::act || storage == DType::f32) return o.bytes;
  std::vector<uint8_t> bytes(o.bytes.size() / 2);
  for (size_t i = 0; i < bytes.size() / 2; i++) {
    float f;
    std::memcpy(&f, o.bytes.data() + 4 * i, 4);
    uint16_t h = f32_to_bf16(f);
    std::memcpy(bytes.data() + 2 * i, &h, 2);
  }
  return bytes;
}

std::vector<uint8_t> loaded(const Operand& o, DType storage, const uint8_t* data) {
  std::vector<uint8_t> bytes(o.bytes.size());
  if (o.type != Type::act || storage == DType::f32) {
    if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
    return bytes;
  }
  for (size_t i = 0; i < bytes.size() / 4; i++) {
    uint16_t h;
    std::memcpy(&h, data + 2 * i, 2);
    float f = bf16_to_f32(h);
    std::memcpy(bytes.data() + 4 * i, &f, 4);
  }
  return bytes;
}

std::vector<uint8_t> half_floats(Random& random, size_t n, bool bf16) {
  std::vector<uint8_t> bytes(n * 2);
  for (size_t i = 0; i < n; i++) {
    uint16_t h = bf16 ? f32_to_bf16(random.normal(0.1f)) : uint16_t(random.below(2) << 15 | (9 + random.below(5)) << 10 | random.below(1024));
    if (!bf16 && i < 3) h = uint16_t(i * 0x8123);  // zero, a subnormal, a small value
    std::memcpy(bytes.data() + 2 * i, &h, 2);
  }
  return bytes;
}

}  // namespace

Operand absent() { return {}; }
Operand floats(const Floats& values, Role role) { return operand(Type::f32, role, values); }
Operand acts(const Floats& values, Role role) { return operand(Type::act, role, values); }
Operand words(const Words& values, Role role) { return operand(Type::u32, role, values); }
Operand packed(const std::vector<uint8_t>& bytes) { return {Role::in, Type::packed, bytes}; }
Operand out_floats(size_t n, Role role) { return floats(nans(n), role); }
Operand out_acts(size_t n, Role role) { return acts(nans(n), role); }
Operand out_words(size_t n) { return words(Words(n, 0xdeadbeef), Role::out); }
Operand live_rows(uint32_t rows, uint32_t position) {
  LilyStep step{};
  step.rows = rows;
  step.position = position;
  return record(step);
}

std::vector<std::vector<uint8_t>> run_case(const Case& c, const std::string& isa, DType storage, Placement placement, uint32_t split) {
  cpu::KernelFn fn = find_cpu_kernel(c.kernel, isa, storage);
  std::vector<ExactMemory> held;
  std::vector<void*> pointers;
  size_t odd = 1;
  for (const Operand& o : c.buffers) {
    if (o.role == Role::absent) {
      pointers.push_back(nullptr);
      continue;
    }
    std::vector<uint8_t> bytes = stored(o, storage);
    held.emplace_back(bytes.size(), o.type == Type::packed ? odd : 0, placement);
    if (o.type == Type::packed) odd = (odd + 2) % 8;
    if (!bytes.empty()) std::memcpy(held.back().data(), bytes.data(), bytes.size());
    pointers.push_back(held.back().data());
  }
  ExactMemory args(c.args.size(), 0, placement);
  std::memcpy(args.data(), c.args.data(), c.args.size());
  const uint32_t size = split ? split : std::max(c.groups, 1u);
  for (uint32_t range = groups_of(c.groups, size); range-- > 0;)
    fn({args.data(), pointers.data()}, range * size, std::min(c.groups, (range + 1) * size));
  std::vector<std::vector<uint8_t>> results;
  for (size_t i = 0; i < c.buffers.size(); i++)
    results.push_back(pointers[i] ? loaded(c.buffers[i], storage, static_cast<uint8_t*>(pointers[i])) : std::vector<uint8_t>{});
  return results;
}

LilyFormat format_of(const std::string& name) {
  if (name == "bf16") return {LILY_W_BF16, 0, 0};
  if (name == "f16") return {LILY_W_F16, 0, 0};
  if (name == "f32") return {LILY_W_F32, 0, 0};
  return {LILY_W_AFFINE, uint32_t(std::stoul(name)), uint32_t(std::stoul(name.substr(name.find('g') + 1)))};
}

void TestWeight::push(std::vector<Operand>& buffers) const {
  buffers.push_back(packed(codes));
  buffers.push_back(format.kind == LILY_W_AFFINE ? packed(scales) : absent());
  buffers.push_back(format.kind == LILY_W_AFFINE ? packed(biases) : absent());
}

uint64_t Random::next() {
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull >> 16;
}

float Random::normal(float scale) {
  float sum = 0;
  for (int i = 0; i < 6; i++) sum += float(below(1u << 20)) / float(1u << 20) - 0.5f;
  return sum * 1.41421356f * scale;
}

Floats Random::normals(size_t n, float scale) {
  Floats values(n);
  for (float& v : values) v = normal(scale);
  return values;
}

TestWeight Random::weight(const LilyFormat& format, uint64_t rows, uint32_t K) {
  TestWeight w{format, {}, {}, {}};
  const size_t n = size_t(rows) * K;
  if (format.kind == LILY_W_AFFINE) {
    w.codes.resize(n * format.bits / 8);
    for (uint8_t& b : w.codes) b = uint8_t(next());
    const float scale = 0.3f / float(1u << format.bits);
    for (size_t i = 0; i < n / format.group; i++)
      for (auto [values, size] : {std::pair{&w.scales, scale}, std::pair{&w.biases, 0.1f}}) {
        uint16_t h = f32_to_bf16(normal(size));
        values->push_back(uint8_t(h));
        values->push_back(uint8_t(h >> 8));
      }
  } else if (format.kind == LILY_W_F32) {
    w.codes = floats(normals(n, 0.1f)).bytes;
  } else {
    w.codes = half_floats(*this, n, format.kind == LILY_W_BF16);
  }
  return w;
}

Floats partial_squares(const Floats& h) {
  Floats sums(h.size() / LILY_SSQ_BLOCK);
  for (size_t i = 0; i < h.size(); i++) sums[i / LILY_SSQ_BLOCK] += h[i] * h[i];
  return sums;
}

}  // namespace lily::test
