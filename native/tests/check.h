// Test assertions. A failed one prints where and what, and exits: after a memory error nothing else is worth knowing.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>

inline long long cases = 0;   // products, lookups, packings and refusals so far, counted on the main thread

template <class... Values>
[[noreturn]] void fail(const char* file, int line, const char* format, Values... values) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  if constexpr (sizeof...(values)) std::fprintf(stderr, format, values...);
  else std::fputs(format, stderr);
  std::fputc('\n', stderr);
  std::exit(1);
}

#define EXPECT(claim, ...) \
  do { if (!(claim)) fail(__FILE__, __LINE__, __VA_ARGS__); } while (0)
