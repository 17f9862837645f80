// SPDX-License-Identifier: Apache-2.0

// Package ucx is the C data plane of UCX behind a Go face that does not show it.
//
// A Context and its Conns move bytes between processes over libucp, which Load opens at run
// time; with CGO_ENABLED=0 there is none, and Load says so. A batch is one crossing; polling
// is none. A context has workers, each with a lock and a thread that drives it when no other
// thread does:
//
//   - load.c, abi.h: libucp, in our own words;
//   - open.c, progress.c: contexts, workers, their threads and locks;
//   - memory.c, shared.c, fence.c: our memory, and taking it back from peers;
//   - conn.c, end.c, import.c: connections, their ends, and the memory of peers that they know;
//   - batch.c, runs.c, direct.c, pulled.c, served.c, window.c: what we ask for, by plain loads
//     and stores, by copies of the kernel, or by messages that the owner serves;
//   - pull.c, gate.c: those copies, and how a process takes back the leave to make them;
//   - message.h, send.c, arrive.c, serve.c, inbox.c: messages, and what becomes of those that
//     arrive. Nothing in one is believed.
//
// It knows a batch as csrc/pieces.h has it: descriptors, or entries of a pattern.
package ucx
