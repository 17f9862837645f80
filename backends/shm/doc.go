// SPDX-License-Identifier: Apache-2.0

// Package shm moves bytes between processes of one user on one host.
//
// Memory that can be shared (hostmem's) is mapped by the peer, and one copy moves the bytes.
// Foreign memory, which only its process has, is read with process_vm_readv and written with
// process_vm_writev, one copy as well. Control runs over a Unix socket between processes of the
// same uid. Data, notifications, answers and announcements never touch it.
//
// A peer maps an arena, which is all of a Shared, as a whole and writable. Bounds, ReadOnly and
// epochs keep programs apart that use this package; against a hostile process of the same user,
// which could as well attach a debugger, nothing here protects.
//
// # A connection
//
// The initiator dials the owner's socket (peer.go), and the owner greets it (owner.go). Two kinds
// of pages are shared from then on (table.go): the owner's key table, which says for each key the
// epoch and where the memory is, and the connection's page, in which the initiator announces its
// copies and both sides have a ring of messages (notify.go). Import looks a token up in the table,
// and maps the arena: the first time it asks the owner for descriptors (imports.go, fetch.go).
//
// # A write, by the initiator alone
//
//  1. Submit (initiator.go) checks the batch and takes the places of its completion and message.
//  2. A small batch it copies itself. A large one becomes a job (job.go), of which the workers and
//     the goroutine that waits (Help) copy a piece each time (step).
//  3. move copies a piece: it announces it, takes the generation of the arena's pages, looks at the
//     epoch, copies through a mapping of that generation only, takes the announcement back, and
//     looks at the generation again. Where pages have moved the job waits until they are mapped
//     anew (park). For foreign memory the system call begins with a byte for the owner's gate
//     (foreign.go).
//  4. The message becomes visible, and the completion can be polled.
//
// # A revoke, by the owner alone
//
// All of it is in proof.go, and Revoke is the order of things:
//
//  1. The epoch ends (endEpoch): what is announced later copies nothing.
//  2. What was announced before ends, which takes well under a millisecond.
//  3. A peer that stays for longer than Config.Grace is frozen, or dead. Under shared memory fresh
//     pages go, and the generation moves on before: what it still writes lands in pages that
//     nothing uses (freshPages). Before foreign memory the gate is shut, and the threads of the
//     writer are looked at (shutGate, gate.go).
//  4. The key is free (freeKey).
//
// Backend.Close ends all epochs, and then looks for the same proofs (closeMemories).
// spec/shm_mapped.pml and spec/shm_gate.pml are the models of 3 of a write beside a revoke.
package shm
