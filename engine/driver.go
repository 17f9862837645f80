// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"

	"github.com/sluicehq/sluice/driver"
)

// What a program needs of package driver stands here under the same names, so that it
// imports the engine and the backends that it wants.
type (
	Op               = driver.Op
	Kind             = driver.Kind
	Kinds            = driver.Kinds
	Reach            = driver.Reach
	Backend          = driver.Backend
	Segment          = driver.Segment
	Shared           = driver.Shared
	DMABuf           = driver.DMABuf
	Pattern          = driver.Pattern // scattered entries, by lists of slots and nests of loops
	Loop             = driver.Loop    // of a Pattern
	Side             = driver.Side    // of a Pattern
	UnavailableError = driver.UnavailableError
	PieceError       = driver.PieceError
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

// ContextError says why a context has ended: the cause, which is ErrTimeout, too, where a
// deadline has passed.
func ContextError(ctx context.Context) error { return driver.ContextError(ctx) }
