#include "traffic.hpp"

#include <algorithm>
#include <unordered_map>

namespace lily_sim {

constexpr uint64_t kLineBytes = 128;

void Traffic::begin_launch(const LilySimLaunch& launch) {
  totals_.assign(launch.n_buffers < 20 ? launch.n_buffers : 20, Totals{});
  for (size_t i = 0; i < totals_.size(); i++) {
    totals_[i].name = launch.buffers[i].name ? launch.buffers[i].name : "";
    totals_[i].size = launch.buffers[i].data ? launch.buffers[i].bytes : 0;
  }
  for (auto& simd : logs_)
    for (auto& log : simd) log.clear();
}

void Traffic::log(uint32_t simd, uint32_t lane, uint32_t buffer, uint64_t offset, uint32_t bytes, bool write, const void* site) {
  if (buffer < totals_.size()) logs_[simd][lane].push_back({reinterpret_cast<uintptr_t>(site), offset, bytes, uint16_t(buffer), write});
}

void Traffic::simdgroup_met(uint32_t simd) {
  auto& logs = logs_[simd];
  size_t shortest = logs[0].size(), longest = shortest;
  for (uint32_t l = 1; l < kSimdWidth; l++) {
    shortest = std::min(shortest, logs[l].size());
    longest = std::max(longest, logs[l].size());
  }
  if (longest == 0) return;
  const Access* group[kSimdWidth];
  size_t i = 0;
  // The usual case: all lanes execute the same instructions.
  for (; i < shortest; i++) {
    bool same = true;
    for (uint32_t l = 0; l < kSimdWidth; l++) {
      group[l] = &logs[l][i];
      same = same && group[l]->site == group[0]->site && group[l]->buffer == group[0]->buffer && group[l]->write == group[0]->write;
    }
    if (!same) break;
    count(group, kSimdWidth);
  }
  if (i < longest) {
    // Lanes went different ways: the n-th execution of an instruction in one lane goes with the n-th in the others.
    struct Group {
      std::vector<const Access*> accesses;
    };
    std::unordered_map<uint64_t, std::vector<Group>> groups;
    std::vector<uint64_t> order;
    for (uint32_t l = 0; l < kSimdWidth; l++) {
      std::unordered_map<uint64_t, size_t> seen;
      for (size_t k = i; k < logs[l].size(); k++) {
        const Access& a = logs[l][k];
        const uint64_t key = a.site * 64 + a.buffer * 2u + a.write;
        const size_t n = seen[key]++;
        auto& of_site = groups[key];
        if (of_site.empty()) order.push_back(key);
        if (of_site.size() <= n) of_site.resize(n + 1);
        of_site[n].accesses.push_back(&a);
      }
    }
    for (uint64_t key : order)
      for (const Group& g : groups[key]) count(g.accesses.data(), uint32_t(g.accesses.size()));
  }
  for (auto& log : logs) log.clear();
}

void Traffic::end_threadgroup(uint32_t simds) {
  for (uint32_t s = 0; s < simds; s++) simdgroup_met(s);
}

void Traffic::count(const Access* const* group, uint32_t n) {
  struct Span {
    uint64_t begin, end;
  } spans[kSimdWidth];
  uint32_t used = 0;
  for (uint32_t i = 0; i < n; i++) {
    const uint64_t begin = group[i]->offset, end = begin + group[i]->bytes;
    uint32_t at = used++;
    for (; at > 0 && spans[at - 1].begin > begin; at--) spans[at] = spans[at - 1];
    spans[at] = {begin, end};
  }
  Totals& t = totals_[group[0]->buffer];
  const bool write = group[0]->write;
  auto& bits = write ? t.written_bits : t.read_bits;
  if (bits.empty()) bits.resize((t.size + 63) / 64, 0);
  uint64_t bytes = 0, lines = 0, covered = 0, next_line = 0;
  for (uint32_t i = 0; i < used; i++) {
    const uint64_t begin = std::max(spans[i].begin, covered), end = spans[i].end;
    if (end > begin) bytes += end - begin;
    covered = std::max(covered, end);
    const uint64_t first = std::max(spans[i].begin / kLineBytes, next_line), last = (spans[i].end - 1) / kLineBytes + 1;
    if (last > first) lines += last - first;
    next_line = std::max(next_line, last);
    for (uint64_t b = begin; b < end;) {
      const uint64_t bit = b % 64, take = std::min(end - b, 64 - bit);
      bits[b / 64] |= (take == 64 ? ~uint64_t(0) : ((uint64_t(1) << take) - 1)) << bit;
      b += take;
    }
  }
  (write ? t.written : t.read) += bytes;
  t.transactions += lines;
}

void Traffic::finish(LilySimCounters& counters) const {
  auto ones = [](const std::vector<uint64_t>& bits) {
    uint64_t n = 0;
    for (uint64_t w : bits) n += uint64_t(__builtin_popcountll(w));
    return n;
  };
  counters.n_traffic = 0;
  for (const Totals& t : totals_) {
    LilySimTraffic& out = counters.traffic[counters.n_traffic++];
    out = {t.name.c_str(), t.read, t.written, ones(t.read_bits), ones(t.written_bits), t.transactions, t.read + t.written};
  }
}

}  // namespace lily_sim
