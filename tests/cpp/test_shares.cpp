// How threads divide the threadgroups of a decode stage.
#include <array>
#include <atomic>
#include <thread>

#include "check.hpp"
#include "device/cpu/shares.hpp"
#include "fixture.hpp"

namespace lily::test {
namespace {

using Range = std::pair<uint32_t, uint32_t>;

std::vector<Range> all_of(Shares& shares, size_t part, uint32_t thread) {
  std::vector<Range> pieces;
  uint32_t begin, end;
  while (shares.own(part, thread, &begin, &end)) pieces.push_back({begin, end});
  return pieces;
}

LILY_TEST(shares_are_contiguous_and_equal_in_work) {
  Shares shares(2);
  shares.divide({{10, 100, 1}, {30, 300, 1}}, 2);  // 1,000 + 9,000: the bound lies at 5,000, 13 1/3 into the second
  CHECK_EQUAL(shares.parts(), size_t(2));
  CHECK(all_of(shares, 0, 0) == (std::vector<Range>{{0, 5}, {5, 7}, {7, 8}, {8, 9}, {9, 10}}));
  CHECK(all_of(shares, 0, 1).empty());
  const auto before = all_of(shares, 1, 0), after = all_of(shares, 1, 1);
  CHECK_EQUAL(before.back().second, 14u);
  CHECK_EQUAL(after.front().first, 14u);
}

LILY_TEST(shares_have_pieces_of_at_least_the_asked_size) {
  Shares shares(2);
  shares.divide({{64, 1, 10}}, 2);
  CHECK(all_of(shares, 0, 0) == (std::vector<Range>{{0, 16}, {16, 26}, {26, 32}}));
}

LILY_TEST(shares_of_few_threadgroups_go_to_many_threads) {
  Shares shares(4);
  shares.divide({{6, 1, 1}}, 2);  // bounds at 1, 3 and 4
  for (auto [thread, begin, end] : {std::array{0u, 0u, 1u}, {1u, 1u, 3u}, {2u, 3u, 4u}, {3u, 4u, 6u}}) {
    const auto pieces = all_of(shares, 0, thread);
    CHECK_EQUAL(pieces.front().first, begin);
    CHECK_EQUAL(pieces.back().second, end);
  }
}

LILY_TEST(shares_of_a_late_thread_are_taken_from_the_back) {
  Shares shares(2);
  shares.divide({{16, 1, 1}}, 2);
  CHECK_EQUAL(all_of(shares, 0, 0).size(), size_t(4));
  CHECK(shares.steal(0, 0));
  CHECK(all_of(shares, 0, 0) == (std::vector<Range>{{12, 14}, {14, 15}, {15, 16}}));
  const auto left = all_of(shares, 0, 1);
  CHECK_EQUAL(left.back().second, 12u);
  CHECK(!shares.steal(0, 0));
  CHECK(!shares.steal(0, 1));
}

// Any numbers of threads, dispatches and threadgroups: all is taken, once, also while several take from one another.
LILY_TEST(shares_give_every_threadgroup_once) {
  for (uint32_t threads : {2u, 3u, 8u}) {
    Shares shares(threads);
    for (uint32_t round = 0; round < 60; round++) {
      std::vector<Shares::Part> parts;
      for (uint32_t i = 0; i <= round % 3; i++) parts.push_back({(round * 37 + i * 101) % 300, 1 + (round * 7919 + i) % 40000, 1 + round % 5});
      std::vector<std::vector<std::atomic<uint32_t>>> taken;
      for (const auto& p : parts) taken.emplace_back(p.groups);
      shares.divide(parts, 2 + round % 7);
      std::atomic<uint32_t> ready{0};
      std::vector<std::thread> running;
      for (uint32_t t = 0; t < threads; t++)
        running.emplace_back([&, t] {
          for (ready++; ready < threads;) std::this_thread::yield();
          if (t == round % threads) std::this_thread::yield();
          for (size_t i = 0; i < 2 * parts.size(); i++) {
            const size_t part = i % parts.size();
            do
              for (auto [begin, end] : all_of(shares, part, t))
                for (uint32_t g = begin; g < end; g++) taken[part][g]++;
            while (i >= parts.size() && shares.steal(part, t));
          }
        });
      for (auto& thread : running) thread.join();
      for (const auto& part : taken)
        for (const auto& count : part) CHECK_EQUAL(count.load(), 1u);
    }
  }
}

}  // namespace
}  // namespace lily::test
