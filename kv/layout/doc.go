// SPDX-License-Identifier: Apache-2.0

// Package layout says what the KV cache of a model weighs, where each piece of it lies, and which
// rank sends which bytes to which other rank where two engines lay their caches out differently.
// All of it is arithmetic: the package moves no byte and has no state, and any goroutine may call
// every method.
//
// What arrives is a description of each rank, and for each request its block tables and the span of
// its tokens. What leaves is patterns for engine.Transfer.AddPattern. In order:
//
//  1. A Side describes where an engine keeps the cache of one rank (side.go): for each layer and
//     part a View, which is a base and strides. NewSide makes one from a Spec, the shape of a
//     model, and a Placement, the rank and its layout (spec.go); models.go has the Specs of public
//     models. A GroupSpec makes the sides of a group from text (groupspec.go), or a program fills
//     in the strides. Side.Marshal and ParseSide carry a side to a peer (encode.go).
//  2. NewPlan compares two groups of sides, once (plan.go). It refuses with an *UnlikeError what
//     cannot meet, and chooses a sender for each cell that a receiver keeps. What one rank sends
//     another is an Edge: a list of moves, each of which is the cells of a part that lie in one
//     block on both sides (move.go).
//  3. For each request and layer Edge.Layer turns the moves into patterns (request.go), in constant
//     time and without allocation. Plan.Tail names what must be zeroed behind the last token,
//     Side.Ranges what a lease of the request must cover (ranges.go).
//  4. A Digester sums the cells that an edge moves in the memory of either end (digest.go). Both
//     sums are equal if both ends hold the same bytes, however they lay them out; Edge.Locate finds
//     the layer, part, heads and tokens of those that differ.
//
// A cell is the bytes of one token, or of one position of a state, in one layer, part, and head or
// state unit. It is contiguous in every layout; all else is strides.
//
// # What is proved
//
// Bounds are checked once, by Side.Check: every product and sum behind that stays below 1 << 63,
// and a view never leaves its region. A test moves random requests between random layouts and
// compares every byte of all memory with a loop over cells (naive_test.go), which is written from
// the documentation of View and Group alone.
package layout
