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

// From near to far: a backend that reaches far also reaches near.
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

// Caps describes ranges, never the presence of methods: those are seen by type
// assertion.
type Caps struct {
	Name       string // lower case, unique in an engine
	Reach      Reach
	Pairs      Pairs
	DescsMax   int    // descriptors in one Submit; at least 1
	PagesMax   int    // entries in one SubmitPages; 0 without a Pager
	LenMax     uint64 // bytes in one descriptor; 0: any
	Align      uint64 // power of two that offsets and lengths must be multiples of; 0 or 1: any
	MessageMax int    // bytes of a notification; 0 without a Notifier
	Ordered    bool   // batches to one peer land in the order of submission
	Sleep      bool   // who waits should sleep at once: to spin keeps from running whom the kernel wakes for its completions
	Cost       Cost
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
