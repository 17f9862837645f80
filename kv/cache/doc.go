// SPDX-License-Identifier: Apache-2.0

// Package cache keeps KV blocks by their content, in memory that outlives the process and on disks
// behind it. docs/cache.md has the promises.
//
// A block is some bytes under a Key, in a Namespace: immutable, of any length up to an extent.
// Where it lies in the memory of who serves the model a Place says; where it lies here is the
// cache's business. The cache begins each transfer itself, so that what it knows of its own end is
// all that keeps a slot from its next use. For keys that name something else than content there is
// Replace, by which another block takes the place of the one that a key has.
//
// The way of a Store or a Replace (store.go, one function): find which keys are not known; reserve
// slots, for which others go; take an entry for each, by which another Store of the key learns that
// it comes; read the bytes in batches; take their CRC-32C; commit the record, from which moment on
// the block is found, also by a process that opens the file after a kill; give the chain its place
// in the order in which blocks go; offer it to the disks.
//
// The way of a Load (load.go, one function): count the chain as used, from its end on; then, batch
// by batch, pin what is there, read from the disks what is only there (swap.go), and write to the
// place what is verified meanwhile; a batch is Done once both have ended.
//
// What keeps a block where it is: its pins, of operations and of Pins, in memory; a Retain hint, in
// one tier or the other (hold.go: keeps). What lets it go, beside the policy: Remove, a TTL, which
// each look at a block heeds, and the keeper, which does each second what goes by the cache's clock
// (flow.go: second).
//
// Files by what they keep:
//
//	index.go    entries by key, in shards with a lock each; what a process before has left
//	entry_unsafe.go  the entry, 64 bytes of the memory file
//	file.go     what the files of both tiers share: header, lock, room
//	memory.go   the memory file: names, table, data
//	slots.go    places of one tier, cut from extents
//	policy.go   the order of the blocks of a tier: S3-FIFO, LRU, ARC
//	evict.go    which block goes next, and how one leaves a tier
//	namespace.go  namespaces, quotas and priorities
//	flow.go     when blocks go to the disks, and when they have expired; the cache's clock
//	hold.go     what keeps blocks: Pins and Retain hints, by one budget; Prefetch
//	hint.go     what a program knows of blocks; envelope.go reads the field's envelope of it
//	estimate.go what a Load would take
//	events.go   what happens to blocks, for readers that hold nothing up
//	disk.go     the file of a disk, its records, its budget and its health
//	rate.go     bytes a second of a namespace
//	below.go    what goes to a tier below the disks, and comes from there
//	move.go     places of others, transfers and their proof, outcomes
//	list.go     what operators ask for: namespaces, and the blocks of one
//
// A disk has a goroutine that writes to it (swap.go: swapOut), and one that empties records.
// Nothing else writes to its file. What leaves the disk frees its place and its record at once;
// before the writer begins with the next blocks the records of all that has left are emptied, and
// the budget is saved. Remove waits until its records are empty.
//
// Locks are taken in this order: timing, spaces, recording, shards by number, disk, slots or
// listener. None is held across a transfer or a call of the kernel, but recording, which the two
// goroutines of a disk alone have.
package cache
