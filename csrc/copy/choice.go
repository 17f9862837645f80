// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
)

// Variant is one way to copy contiguous bytes.
type Variant uint32

// The variants. Those called Stream store past the caches: the processor does not read the lines
// that they overwrite, and keeps the other lines in its caches.
const (
	Plain Variant = iota // libc's memcpy; without cgo Go's copy
	Movsb
	AVX2
	AVX2Stream
	AVX512
	AVX512Stream
	Pairs // of arm64: ldp and stp
	PairsStream
)

var names = []string{plainName, "movsb", "avx2", "avx2-stream", "avx512", "avx512-stream", "pairs",
	"pairs-stream"}

// String returns the name that ParseVariant reads.
func (v Variant) String() string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("variant %d", uint32(v))
}

// ParseVariant reads the name of a variant that this build and this processor have.
func ParseVariant(name string) (Variant, error) {
	var known []string
	for _, v := range Variants() {
		if v.String() == name {
			return v, nil
		}
		known = append(known, v.String())
	}
	return Plain, fmt.Errorf("copy by %q: this machine has %s", name, strings.Join(known, ", "))
}

// Variants lists those that this build and this processor have, Plain first.
func Variants() []Variant {
	var list []Variant
	for v := range Variant(len(names)) {
		if has(v) {
			list = append(list, v)
		}
	}
	return list
}

// Way is how a batch is copied: runs of at least Run bytes by Variant, shorter ones as entries
// that may be scattered.
type Way struct {
	Variant Variant
	Run     uint64
}

// plain is the way of a batch that nothing was chosen for.
var plain = Way{Plain, math.MaxUint64}

// Copy copies one run within this process. The ranges do not overlap.
func (w Way) Copy(dst, src []byte) {
	if uint64(len(src)) < w.Run {
		copy(dst, src) // without a crossing into C
		return
	}
	w.Variant.one(dst, src)
}

func (v Variant) one(dst, src []byte) { v.Copy(dst, src, uint64(len(src))) }

// Choice says which batches go which way: Way copies those of at least From bytes, and Plain copies
// smaller ones, which fit the caches.
type Choice struct {
	Way  Way
	From uint64
	Why  string // the result of the measurement, in one line
}

// Only chooses one variant for the long runs of all batches.
func Only(v Variant) Choice {
	c := Choice{Way: Way{v, probeRuns[len(probeRuns)-1]}, Why: v.String() + ", as configured"}
	if v == Plain {
		c.Way = plain
	}
	return c
}

// For is the way of a batch of so many bytes.
func (c *Choice) For(batch uint64) Way {
	if batch >= c.From {
		return c.Way
	}
	return plain
}

// choice is made once a process: measured, or Set or configured before.
type choice struct {
	mu         sync.Mutex
	configured string // by Configure; guarded by mu

	made    atomic.Pointer[Choice] // first undecided
	begun   atomic.Bool
	once    sync.Once
	measure func() Choice
}

func newChoice(measure func() Choice) *choice {
	p := &choice{measure: measure}
	p.made.Store(&undecided)
	return p
}

var process = newChoice(measure)

// undecided has the smallest batch that starts the measurement: 1 MiB, which takes less time.
var undecided = Choice{Way: plain, From: 1 << 20}

// For returns the way of a batch of so many bytes, and does not wait: the first large batch
// of a process starts the measurement, and is copied by Plain. Parallel calls are allowed.
func For(batch uint64) Way { return process.way(batch) }

// Chosen returns the choice of this process. The first call takes some milliseconds, for it
// measures. Parallel calls are allowed.
func Chosen() Choice { return process.chosen() }

// Set makes the choice of this process, in place of the measurement. Batches under way keep their
// way. A variant that this machine lacks is an error. Parallel calls are allowed.
func Set(c Choice) error {
	if _, err := ParseVariant(c.Way.Variant.String()); err != nil {
		return err
	}
	process.made.Store(&c)
	return nil
}

func (p *choice) way(batch uint64) Way {
	c := p.made.Load()
	if batch < c.From { // most: a load and an inlined comparison
		return plain
	}
	return p.large(c)
}

func (p *choice) large(c *Choice) Way {
	if c == &undecided && p.begun.CompareAndSwap(false, true) {
		go p.chosen()
	}
	return c.Way
}

func (p *choice) chosen() Choice {
	if c := p.made.Load(); c != &undecided {
		return *c
	}
	p.once.Do(func() {
		c := p.measure()
		p.made.CompareAndSwap(&undecided, &c) // Set may have come first
	})
	return *p.made.Load()
}
