// SPDX-License-Identifier: Apache-2.0

// Package shm moves bytes between processes of one user on one host.
//
// There are two kinds of memory. Shared memory, of package hostmem, is mapped by the peer, which
// copies the bytes once. Foreign memory is any other memory: the peer reads it with
// process_vm_readv and writes it with process_vm_writev, which copy once, too. A Unix socket
// between the processes is for control messages only, when they connect and import. Data,
// notifications, answers and announcements go through shared pages.
//
// A peer maps all of a driver.Shared, the arena, and may write to all of it. Bounds, ReadOnly and
// epochs protect against errors of programs that use this package. Nothing here protects against a
// hostile process of the same user, which could as well attach a debugger.
//
// # A connection
//
// The initiator dials the owner's socket (peer.go), and the owner greets it (owner.go). From then
// on they share two kinds of pages (table.go). One is the owner's key table: for each key the
// epoch, which changes with every revoke, and where the memory is. The other is the connection's
// page: in it the initiator announces its copies, and both sides have a ring of messages
// (notify.go). Import looks a token up in the table, and maps the arena. The first import of an
// arena asks the owner for its descriptors (imports.go, fetch.go).
//
// # A write, by the initiator alone
//
//  1. Submit (initiator.go) checks the batch and reserves room for its completion and its message.
//  2. Submit copies a small batch itself. A large one becomes a job (job.go): the workers and the
//     goroutine that waits for it (Help) copy it piece by piece (step).
//  3. move copies a piece. It announces the piece; reads the generation of the arena's pages, which
//     changes when the owner replaces pages; checks the epoch; copies through a mapping of that
//     generation; withdraws the announcement; and reads the generation again. If it has changed,
//     the job waits until the new pages are mapped (park), and copies the piece again. For foreign
//     memory the system call begins with one byte for the owner's gate, a page whose removal stops
//     the call, and that no other process has at its place (foreign.go).
//  4. The message becomes visible, and the completion can be polled.
//
// # A revoke, by the owner alone
//
// All of it is in proof.go. Revoke shows the order:
//
//  1. It ends the epoch (endEpoch): a piece that is announced later finds that and copies nothing.
//  2. It waits for the pieces that were announced before, mostly for less than a millisecond.
//  3. If an announcement stays for longer than Config.Grace, its process is frozen or dead. Revoke
//     then gives shared memory fresh pages, after it has changed the generation: late writes land
//     in pages that nothing uses (freshPages). For foreign memory it shuts the gate, and waits
//     until no thread of the writer is inside the system call (shutGate, gate.go).
//  4. It frees the key (freeKey).
//
// Backend.Close ends all epochs first, and then waits for the same proofs (closeMemories).
//
// spec/shm_mapped.pml and spec/shm_gate.pml model move beside a Revoke.
package shm
