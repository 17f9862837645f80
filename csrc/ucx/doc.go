// SPDX-License-Identifier: Apache-2.0

// Package ucx is the C data plane of UCX behind a Go face that does not show it.
//
// A Context and its Conns move bytes between processes over libucp, which Load opens at run
// time; with CGO_ENABLED=0 there is none, and Load says so. Bytes travel in messages, which the
// owner of the memory lands and answers. A batch is one crossing; polling is none. A context has
// workers, each with a lock and a thread that drives it when no other thread does:
//
//   - load.c, abi.h: libucp, in our own words;
//   - open.c, progress.c: contexts, workers, their threads and locks;
//   - memory.c: our memory, and taking it back from peers;
//   - conn.c, end.c, import.c: connections, their ends, and the memory of peers that they know;
//   - batch.c, runs.c, served.c, window.c, help.c: what we ask for;
//   - message.h, send.c, arrive.c, serve.c, ages.c, inbox.c: messages, and what becomes of those
//     that arrive. Nothing in one is believed.
//
// It knows a batch as csrc/pieces.h has it: descriptors, or entries of a pattern.
package ucx
