// SPDX-License-Identifier: Apache-2.0

// Command c is the C ABI of sluice: built as libsluice.so and libsluice.a, described by sluice.h,
// which is written by hand and is the contract.
//
// # The way of a call
//
//  1. A function of sluice.h (calls_engine.c, calls_peer.c, calls_transfer.c, calls_kv.c,
//     calls_handoff.c, calls_ring.c, calls_sparse.c) refuses the child of a fork
//     (slgo_check_fork), copies a struct of the caller's version into one of this version
//     (slgo_copy), and calls one exported function of Go, on the caller's own thread.
//  2. That function (slgo…) looks its handles up. A handle is kind, generation and index
//     (handles.go), so that no number of a caller reaches memory of ours: a stale or made-up one is
//     an error.
//  3. It calls package engine, and writes the outcome: a code (errors.go), and for the thread's
//     sluice_error the text of the error, in words of C and Python (words.go). Exported functions
//     take a fault, in which they write that text.
//
// Between posting and the outcome nothing is allocated. A transfer that one thread changes or posts
// is busy to the others (hold). Lists of the caller are read in place (inPlace) and are the
// caller's again when the call returns, but for index lists, which it keeps until the transfer is
// reset. What a lookup of a pool (sparse.go) has missed is copied out: the step needs its own list.
//
// # Descriptors
//
// There are no callbacks. Transfers that have ended go into a list with an eventfd (endings,
// completion.go); messages come from the engine, or from a queue with an eventfd once a program
// has asked for that (inbox, notify.go). An operation of a KV cache (kv.go, kvop.go) has an eventfd
// of its own, where the program asks for it, and so have a request of a hand-over (handoff.go) and
// a step of a pool.
//
// # The end
//
// sluice_close closes the engine and then makes stale what was of it; memory of sluice_alloc
// belongs to no engine and stays until sluice_memory_close, and rings (ring.go) until
// sluice_ring_close. A process that exits closes all its engines and rings first (slgoExit), so
// that nothing lands in memory that its own handlers unmap.
package main

// main is what the build mode asks for; it is not called.
func main() {}
