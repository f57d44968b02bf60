#pragma once

#include <cstdint>
#include <iosfwd>

struct DoctorOptions {
  int64_t ranks = 2;
};

/// Prints what it finds. Returns the number of things that are wrong.
int64_t doctor(const DoctorOptions& options, std::ostream& out);
