/* SPDX-License-Identifier: Apache-2.0 */
/* The clock that benchmarks for NIXL read: it only goes forward. */
#ifndef SLUICE_NIXL_TIME_H
#define SLUICE_NIXL_TIME_H

#include <chrono>
#include <cstdint>

namespace nixlTime
{

using namespace std::chrono;

using ns_t = uint64_t;
using us_t = uint64_t;
using ms_t = uint64_t;
using sec_t = uint64_t;

template <class Unit> uint64_t since_start()
{
	auto t = steady_clock::now().time_since_epoch();
	return static_cast<uint64_t>(duration_cast<Unit>(t).count());
}
inline ns_t getNs() { return since_start<nanoseconds>(); }
inline us_t getUs() { return since_start<microseconds>(); }
inline ms_t getMs() { return since_start<milliseconds>(); }
inline sec_t getSec() { return since_start<seconds>(); }

} // namespace nixlTime

#endif
