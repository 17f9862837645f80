// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What a measurement takes at most, and by how much a variant must win: on a busy machine
// a small gain may be chance.
const (
	probeBytes = 512 << 10 // of each of two memories
	probeTries = 4         // of each variant, in turn: the best counts
	probeLimit = 50 * time.Millisecond
	clearly    = 1.15
	likely     = 1.05 // a later variant over an earlier one
)

// The lengths of runs that are tried, longest first.
var probeRuns = []uint64{64 << 10, 16 << 10, 8 << 10}

// probe takes the time of one copy of probeBytes in runs, between memories that no cache holds.
// That leaves out the writing back of what a regular store leaves in the caches, so a stream wins
// by more than is seen here. 0: it cannot be done, or the time of the measurement is over.
type probe func(v Variant, run uint64) time.Duration

// measure makes the choice of this machine.
func measure() Choice {
	begin := time.Now()
	cache := lastLevel(cpu0Cache)
	return measured(1, func() bool { return time.Since(begin) > probeLimit },
		func(Variant) (uint64, string) { return cache / 3, "a third of the last-level cache" })
}

const cpu0Cache = "/sys/devices/system/cpu/cpu0/cache"

// threshold is the smallest batch for a variant that is faster beyond the caches, and how it was
// found.
type threshold func(v Variant) (bytes uint64, why string)

// measured chooses by probes, each the best of so many copies, until over.
func measured(repeats int, over func() bool, from threshold) Choice {
	if len(Variants()) == 1 {
		return Choice{Way: plain, Why: plainName + ": there is no other"}
	}
	mem, err := probeMemory(probeBytes)
	if err != nil {
		return Choice{Way: plain,
			Why: fmt.Sprintf("%s: no memory to measure others: %v", plainName, err)}
	}
	defer unix.Munmap(mem)
	dst, src := mem[:probeBytes], mem[probeBytes:]
	return choose(func(v Variant, run uint64) (best time.Duration) {
		for range repeats {
			if !evict(mem) || over() {
				return 0
			}
			start := time.Now()
			v.Copy(dst, src, run)
			if took := max(1, time.Since(start)); best == 0 || took < best {
				best = took
			}
		}
		return best
	}, Variants(), from)
}

// probeMemory maps two memories of that size, one behind the other. Unmap it in the end.
func probeMemory(bytes int) ([]byte, error) {
	mem, err := unix.Mmap(-1, 0, 2*bytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, err
	}
	for i := range mem {
		mem[i] = 0xA5 // some processors store zeros faster than anything else
	}
	return mem, nil
}

// choose finds the fastest of variants, the first of which is Plain, and the shortest run for which
// it wins clearly. Within the caches no variant was faster than libc, and those that stream are
// slower. A batch of less than a third of the last-level cache leaves room in it for more than its
// source and its destination: that is the threshold where none was measured.
func choose(p probe, variants []Variant, from threshold) Choice {
	times := p.best(variants, probeRuns[0])
	fastest := 0
	for i := range times {
		if float64(times[i])*likely < float64(times[fastest]) {
			fastest = i
		}
	}
	if times == nil || !wins(times[fastest], times[0]) {
		return Choice{Way: plain, Why: plainName + ": no other is clearly faster"}
	}
	c := Choice{Way: Way{variants[fastest], probeRuns[0]}}
	for _, run := range probeRuns[1:] {
		t := p.best([]Variant{Plain, c.Way.Variant}, run)
		if t == nil || !wins(t[1], t[0]) {
			break
		}
		c.Way.Run = run
	}
	var why string
	c.From, why = from(c.Way.Variant)
	c.Why = fmt.Sprintf("%v for runs from %s on in batches from %s on, %s "+
		"(%.1f GB/s beside %.1f of %s), else %s", c.Way.Variant, size(c.Way.Run),
		size(c.From), why, rate(times[fastest]), rate(times[0]), plainName, plainName)
	return c
}

func wins(t, plain time.Duration) bool { return float64(t)*clearly <= float64(plain) }

// best returns the shortest time of each variant, tried in turn; nil: there was no time.
func (p probe) best(variants []Variant, run uint64) []time.Duration {
	times := make([]time.Duration, len(variants))
	for range probeTries {
		for i, v := range variants {
			t := p(v, run)
			if t == 0 {
				return nil
			}
			if times[i] == 0 || t < times[i] {
				times[i] = t
			}
		}
	}
	return times
}

func rate(d time.Duration) float64 { return probeBytes / float64(d.Nanoseconds()) }

func size(n uint64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%.4g MiB", float64(n)/(1<<20))
}

// unknownCache stands for the cache of a machine whose kernel does not tell its size.
const unknownCache = 32 << 20 // 32 MiB

// lastLevel is the size of the largest cache of a processor, by its directory in sysfs.
func lastLevel(dir string) (bytes uint64) {
	files, _ := filepath.Glob(filepath.Join(dir, "index*", "size")) // its error is a bad pattern
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		number, ok := strings.CutSuffix(strings.TrimSpace(string(text)), "K")
		if n, err := strconv.ParseUint(number, 10, 32); ok && err == nil {
			bytes = max(bytes, n<<10)
		}
	}
	if bytes == 0 {
		return unknownCache
	}
	return bytes
}
