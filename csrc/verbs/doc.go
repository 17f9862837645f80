// SPDX-License-Identifier: Apache-2.0

// Package verbs is the C data plane of RDMA verbs, and its Go interface.
//
// A Context and its Conns move bytes between processes over libibverbs, which Load opens at run
// time. With CGO_ENABLED=0 Load returns an error that says so. Submitting a batch crosses into C
// once; polling does not cross. A context has rails (ports of devices), one lock, and a thread that
// takes completions while no caller does. A connection has queue pairs: they are made, they fail,
// and they are made anew. The caller carries to the peer what both ends must agree on.
//
//   - load.c, abi.h: libibverbs, declared without its headers;
//   - open.c, rail.c, receive.c, memory.c, pin.c: contexts, rails, receives, and local memory as
//     NICs and peers know it;
//   - lock.c, traffic.c, progress.c, step.c, events.c: the lock, the thread, and the events of
//     devices;
//   - conn.c, make.c, pair.c, end.c, import.c: connections, their queue pairs, and the memory of
//     peers that they know;
//   - submit.c, batch.c, post.c, record.c, complete.c, settle.c: batches, the work requests that
//     they are cut into, and how each of both ends;
//   - notif.c, send.c, arrive.c: numbered messages, and credit for them.
//
// No file calls another that calls it in turn: pair.h has their order, and the way of a request.
//
// A batch is what csrc/pieces.h describes: descriptors, or entries of a pattern.
package verbs
