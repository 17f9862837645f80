// SPDX-License-Identifier: Apache-2.0

// Package verbs is the C data plane of RDMA verbs behind a Go face that does not show it.
//
// A Context and its Conns move bytes between processes over libibverbs, which Load opens at run
// time; with CGO_ENABLED=0 there is none, and Load says so. A batch is one crossing; polling is
// none. A context has rails (ports of devices), a lock, and a thread that takes completions
// when no other does; a connection has queue pairs, which are made, fail and are made
// anew. What its two ends must agree on is carried by the caller:
//
//   - load.c, abi.h: libibverbs, in our own words;
//   - open.c, rail.c, receive.c, memory.c: contexts, rails, and our memory as NICs and peers
//     know it;
//   - lock.c, traffic.c, progress.c, step.c, events.c: the lock, the thread, and what devices say;
//   - conn.c, make.c, pair.c, end.c, import.c: connections, their queue pairs, and the memory of
//     peers
//     that they know;
//   - submit.c, batch.c, post.c, record.c, complete.c, settle.c: from batches to work requests,
//     and what becomes of each;
//   - notif.c, send.c, arrive.c: numbered messages, and credit for them.
//
// No file calls another that calls it in turn: pair.h has their order.
//
// It knows a batch as csrc/pieces.h has it: descriptors, or entries of a pattern.
package verbs
