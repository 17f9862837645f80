// SPDX-License-Identifier: Apache-2.0

// Package object is a tier below the disks of a cache, in an object store: cache.Config.Below.
// docs/cache.md has what it promises. Package s3 has the stores of that protocol.
//
// Blocks are packed: those of a chain are evicted one after another, so they come in that order,
// and lie behind each other in one object of up to Config.PackBytes, with an index at its end
// (pack.go). An object is never changed. It is there as a whole or not at all, and its index says
// so once more: one whose footer, length or CRC does not fit is taken for none.
//
// What the store has is known in memory (tier.go). At a start it is read from the ends of the
// objects whose names begin with Config.Prefix, which are of this node alone (collect.go); until
// that has ended the tier finds nothing. Remove of a block that an object has writes a small object
// that names it, a tombstone, which counts for all objects that are older.
//
// Every request has a limit of its own, is tried again within a budget, and counts for the health
// of the store (request.go): after three failures in a row the tier is left alone for ten seconds,
// in which it finds and takes nothing.
//
// A goroutine writes the objects, deletes those that are expired or have no block left, the one
// used longest ago where there are more than Config.Bytes, and collects what a process before has
// left: uploads that have not ended, and objects without an index.
package object
