// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// What Tune takes, beside a second for the copies from memory that no cache holds.
const (
	tuneRepeats  = 50
	tuneBytesMin = 1 << 20
	tuneBytesMax = 128 << 20 // of each of two memories
	tuneSlice    = 50 * time.Millisecond
	tuneTries    = 4
)

// Tune makes the choice of this machine as the first large batch of a process does, but takes some
// seconds and 256 MiB: a busy machine disturbs it less, and it measures which batches are large,
// which a virtual machine has to that cannot use all of the cache that it sees. It ends early by
// the cause of ctx.
func Tune(ctx context.Context) (Choice, error) {
	var failed error
	c := measured(tuneRepeats, func() bool { return ctx.Err() != nil },
		func(v Variant) (bytes uint64, why string) {
			bytes, why, failed = tuneThreshold(ctx, v)
			return bytes, why
		})
	if ctx.Err() != nil {
		return Choice{}, context.Cause(ctx)
	}
	return c, failed
}

func tuneThreshold(ctx context.Context, v Variant) (uint64, string, error) {
	mem, err := probeMemory(tuneBytesMax)
	if err != nil {
		return 0, "", fmt.Errorf("map %s to measure the caches: %w", size(2*tuneBytesMax), err)
	}
	defer unix.Munmap(mem)
	bytes, why := smallestThatWins(func(v Variant, bytes uint64) time.Duration {
		start := time.Now()
		v.Copy(mem[:bytes], mem[tuneBytesMax:][:bytes], bytes)
		return max(1, time.Since(start))
	}, v, func() bool { return ctx.Err() != nil })
	return bytes, why, nil
}

// smallestThatWins copies the same bytes again and again, more and more of them. As long as the
// caches hold them, Plain is as fast.
func smallestThatWins(again probe, v Variant, over func() bool) (bytes uint64, why string) {
	for n := uint64(tuneBytesMax); n >= tuneBytesMin && !over(); n /= 2 {
		var best [2]time.Duration
		spent := time.Duration(0)
		for i := 0; i < tuneTries || spent < tuneSlice; i++ {
			for k, by := range []Variant{Plain, v} {
				took := again(by, n)
				if spent += took; best[k] == 0 || took < best[k] {
					best[k] = took
				}
			}
		}
		if !wins(best[1], best[0]) {
			break
		}
		bytes = n
	}
	if bytes == 0 {
		return 2 * tuneBytesMax, "twice the " + size(tuneBytesMax) + " at which it was no faster"
	}
	return bytes, "as measured"
}
