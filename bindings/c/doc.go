// SPDX-License-Identifier: Apache-2.0

// Command c is the C ABI of sluice: built as libsluice.so and libsluice.a, described by
// sluice.h, which is written by hand and is the contract. A call goes from a wrapper in C
// (calls_*.c), which knows forks, sizes of structs and the text of the last error on this
// thread, to one exported function here, on the caller's own thread, and from there to
// package engine. Handles are numbers that are looked up, so that no mistake of a caller
// reaches memory of ours. Between posting and the outcome nothing is allocated.
//
// Exported functions take a fault, in which they write the text of an error.
package main

// main is what the build mode asks for; it is not called.
func main() {}
