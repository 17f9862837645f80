// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"math"
	"strings"
	"time"
)

// Kind is where bytes live.
type Kind uint8

// The kinds of memory.
const (
	DRAM Kind = iota // host memory
	HBM              // device memory
	File             // a file or block device
	kindCount
)

var kindNames = [kindCount]string{"dram", "hbm", "file"}

// String returns the lower-case name.
func (k Kind) String() string {
	if k < kindCount {
		return kindNames[k]
	}
	return "unknown"
}

// Kinds is a set of kinds, one bit each.
type Kinds uint8

// KindsOf makes a set.
func KindsOf(kinds ...Kind) Kinds {
	var s Kinds
	for _, k := range kinds {
		s |= 1 << k
	}
	return s
}

// Has reports whether k is in the set.
func (s Kinds) Has(k Kind) bool { return k < kindCount && s&(1<<k) != 0 }

// String lists the names with commas.
func (s Kinds) String() string {
	var names []string
	for k := range kindCount {
		if s.Has(k) {
			names = append(names, k.String())
		}
	}
	return strings.Join(names, ",")
}

// Pairs is the bit table of what a backend serves: Pairs[local] is the set of
// the peer's kinds.
type Pairs [kindCount]Kinds

// Serves reports whether the pair is in the table.
func (p Pairs) Serves(local, remote Kind) bool { return local < kindCount && p[local].Has(remote) }

// Local returns every kind that may be registered: as a source or target of its
// own transfers, or as what a peer reaches.
func (p Pairs) Local() Kinds {
	var all Kinds
	for k, remote := range p {
		if remote != 0 {
			all |= 1<<k | remote
		}
	}
	return all
}

// Reach is how far a peer may be.
type Reach uint8

// From near to far. A backend that reaches a network also reaches the own host and process.
const (
	InProcess Reach = iota
	SameHost
	Network
)

var reachNames = [...]string{"process", "host", "network"}

// String returns "process", "host" or "network".
func (r Reach) String() string {
	if int(r) < len(reachNames) {
		return reachNames[r]
	}
	return "unknown"
}

// Caps describes ranges. What a Peer takes beyond descriptors are bits (Peer.Can).
type Caps struct {
	Name       string // lower case, unique in an engine
	Reach      Reach
	Pairs      Pairs
	DescsMax   int    // descriptors in one batch; at least 1
	RunsMax    int    // contiguous runs in one pattern; 0 where no Peer takes patterns
	LenMax     uint64 // bytes in one descriptor, or one run of a pattern; 0: any
	MessageMax int    // bytes of a notification or an answer; 0 where no Peer carries any

	// Sleep: a goroutine that waits should park at once. Spinning would take the CPU from a
	// thread that the kernel wakes for completions.
	Sleep bool

	Cost Cost
}

// Cost is a declared model of time: Setup + PerPiece x pieces + bytes / Rate.
// It needs to be right in order of magnitude only: it ranks candidates until
// the engine has measured them.
type Cost struct {
	Setup, PerPiece time.Duration
	Rate            float64 // bytes a second
}

// Estimate returns the modelled time of a batch.
func (c Cost) Estimate(pieces int, bytes uint64) time.Duration {
	ns := float64(c.Setup) + float64(c.PerPiece)*float64(pieces)
	if c.Rate > 0 {
		ns += float64(bytes) / c.Rate * 1e9
	}
	return time.Duration(math.Min(ns, math.MaxInt64/2))
}
