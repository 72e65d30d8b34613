// The test program: lily_test DATA_DIR [part of a test's name, or -PART for all tests without it]. DATA_DIR is what describe.py wrote.
#include <chrono>
#include <cstdio>
#include <string>

#include "check.hpp"
#include "fixture.hpp"

int main(int argc, char** argv) {
  using namespace lily::test;
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s DATA_DIR [part of a test's name]\n", argv[0]);
    return 2;
  }
  data_directory() = argv[1];
  const std::string filter = argc > 2 ? argv[2] : "";
  const bool exclude = !filter.empty() && filter[0] == '-';
  const std::string part = filter.substr(exclude);
  int run = 0, failed = 0;
  for (const Test& test : tests()) {
    if ((std::string(test.name).find(part) != std::string::npos) == exclude) continue;
    run++;
    std::string error;
    auto start = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& e) {
      error = e.what();
      failed++;
    }
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %6.2f s  %s%s%s\n", error.empty() ? "ok    " : "FAILED", seconds, test.name, error.empty() ? "" : ": ", error.c_str());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed || !run ? 1 : 0;
}
