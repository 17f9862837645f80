// SPDX-License-Identifier: Apache-2.0

package engine

import "github.com/sluicehq/sluice/driver"

// What a program needs of package driver stands here under the same names, so that it
// imports the engine and the backends that it wants.
type (
	// Op is the direction of a Transfer.
	Op = driver.Op
	// Kind is where bytes live.
	Kind = driver.Kind
	// Kinds is a set of kinds.
	Kinds = driver.Kinds
	// Reach is how far a peer may be.
	Reach = driver.Reach
	// Backend moves bytes; Config.Backends takes them.
	Backend = driver.Backend
	// Segment is a range to register.
	Segment = driver.Segment
	// Shared is memory that other processes can map, for a Segment.
	Shared = driver.Shared
	// DMABuf is what other devices know device memory by, for a Segment.
	DMABuf = driver.DMABuf
	// Pattern is scattered entries, by lists of slots and nests of loops.
	Pattern = driver.Pattern
	// Loop is one loop of a Pattern.
	Loop = driver.Loop
	// Side is where the entries of a Pattern lie in one of the two memories.
	Side = driver.Side
	// Range is some contiguous bytes of a region.
	Range = driver.Range
	// UnavailableError says why a backend cannot work on this machine, and what mends that.
	UnavailableError = driver.UnavailableError
	// PieceError names the piece of a batch that failed.
	PieceError = driver.PieceError
)

// The two operations: Read fetches from the peer, Write places there.
const (
	Read  = driver.Read
	Write = driver.Write
)

// The kinds of memory.
const (
	DRAM = driver.DRAM
	HBM  = driver.HBM
	File = driver.File
)

// How far a peer may be.
const (
	InProcess = driver.InProcess
	SameHost  = driver.SameHost
	Network   = driver.Network
)

// LoopsMax is how many loops one entry of a Pattern may have.
const LoopsMax = driver.LoopsMax
