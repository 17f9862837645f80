// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	hostcopy "github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// CopyOp is the Result.Op of Copy.
const CopyOp = "copy"

// CopyCached is how many bytes the caches hold, of each of two memories.
const CopyCached = 1 << 20

// copySlice is well below one time slice of the scheduler.
const copySlice = 2 * time.Millisecond

// CopyShapes are pieces of 4 KiB to 16 MiB, in CopyCached and in that many bytes, too many for the
// caches.
func CopyShapes(uncached uint64) (list []Shape) {
	for _, whole := range []uint64{CopyCached, uncached} {
		for _, size := range []uint64{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
			if size <= whole {
				list = append(list, Shape{Op: driver.Write, Size: size, Batch: int(whole / size),
					Threads: 1})
			}
		}
	}
	return list
}

// Copy measures how one thread copies the pieces of a shape, one behind the other, within this
// process: by the variant that package csrc/copy chose for them, beside Go's copy and every
// variant that this machine has. A note says why it was chosen.
func Copy(ctx context.Context, s Shape, o Options) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	if o.Slice <= 0 {
		o.Slice = copySlice
	}
	o = o.withDefaults()
	o.lists = 1
	mem, err := hostmem.Alloc(2*s.BatchBytes(), hostmem.Options{Purpose: "bench-baseline",
		Populate: true})
	if err != nil {
		return Result{}, fmt.Errorf("allocate memory to copy: %w", err)
	}
	defer mem.Close()
	for i := range mem.Bytes() {
		mem.Bytes()[i] = byte(i) | 1 // some processors store zeros faster than anything else
	}
	ways, err := copyWays(&s, mem.Bytes())
	if err != nil {
		return Result{}, err
	}
	if err := alternate(ctx, ways, o, s.BatchBytes()); err != nil {
		return Result{}, fmt.Errorf("copy %d x %d bytes: %w", s.Batch, s.Size, err)
	}
	res := s.result(ways[0].name, ways[0])
	res.Op, res.Pages, res.Spread = CopyOp, false, 0
	res.Route, res.Memory = CopyOp, string(HostMemory)
	res.Notes = []string{hostcopy.Chosen().Why}
	var beside []Baseline
	for _, w := range ways[1:] {
		beside = append(beside, w.baseline())
	}
	res.SetBaselines(beside)
	return res, nil
}

// copyWays are the chosen variant, Go's copy, and all variants.
func copyWays(s *Shape, mem []byte) ([]*way, error) {
	chosen := hostcopy.Chosen()
	best, v := chosen.For(s.BatchBytes()), hostcopy.Plain
	if s.Size >= best.Run {
		v = best.Variant
	}
	list := []copied{{name: "chosen", by: v}, {name: "go-copy", inGo: true}}
	for _, v := range hostcopy.Variants() {
		list = append(list, copied{name: v.String(), by: v})
	}
	var ways []*way
	for i := range list {
		c := &list[i]
		c.dst, c.src, c.size = mem[:s.BatchBytes()], mem[s.BatchBytes():], s.Size
		w, err := newWay(c.name, s, func(int) (copier, error) { return c, nil })
		if err != nil {
			return nil, err
		}
		ways = append(ways, w)
	}
	return ways, nil
}

// copied is one way to copy within one process.
type copied struct {
	name     string
	by       hostcopy.Variant
	inGo     bool // not by that
	dst, src []byte
	size     uint64
}

func (c *copied) do(int) error {
	if !c.inGo {
		c.by.Copy(c.dst, c.src, c.size)
		return nil
	}
	for i := uint64(0); i < uint64(len(c.src)); i += c.size {
		copy(c.dst[i:][:c.size], c.src[i:][:c.size])
	}
	return nil
}
