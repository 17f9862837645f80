// SPDX-License-Identifier: Apache-2.0

package digest

import (
	"errors"
	"math/big"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// guarded returns memory of n bytes between pages that cannot be read: it begins or ends with a
// page.
func guarded(t testing.TB, n int, atEnd bool) []byte {
	t.Helper()
	page := os.Getpagesize()
	inner := (n + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, inner+2*page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(whole) })
	require.NoError(t, unix.Mprotect(whole[:page], unix.PROT_NONE))
	require.NoError(t, unix.Mprotect(whole[page+inner:], unix.PROT_NONE))
	mem := whole[page : page+inner]
	if atEnd {
		return mem[inner-n:]
	}
	return mem[:n:n]
}

// defined is the digest of one cell, written from the package comment alone.
func defined(k *Key, cell []byte, coord uint64) Digest {
	words := make([]uint32, (len(cell)+7)/8*2)
	for i, b := range cell {
		words[i/4] |= uint32(b) << (8 * (i % 4))
	}
	var f [2]uint64
	for lane := range f {
		key := k.words[lane*len(words)/2:]
		nh := uint64(0)
		for j := 0; j < len(words); j += 2 {
			a := (uint64(words[j]) + key[j/2]&0xffffffff) % (1 << 32)
			b := (uint64(words[j+1]) + key[j/2]>>32) % (1 << 32)
			nh += a * b
		}
		f[lane] = murmur(nh ^ murmur(k.s[lane]^coord))
	}
	return Digest{f[0], f[1], 1}
}

func murmur(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return h
}

// cells lists the offsets and coordinates of all cells, without any overflow.
func cells(c *Cells, each func(at *big.Int, coord uint64)) {
	number := func(a, b uint64) *big.Int {
		return new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
	}
	for i := range uint64(c.Count) {
		per := max(1, uint64(c.At.Per))
		slot, in := (uint64(c.At.First)+i)/per, (uint64(c.At.First)+i)%per
		if c.At.List != nil {
			slot = uint64(c.At.List[slot])
		}
		for j := range c.Outer.N {
			for n := range c.Axis.N {
				at := number(slot, c.At.Stride)
				for _, more := range []*big.Int{number(1, c.At.Base), number(in, c.At.Step),
					number(j, c.Outer.By), number(n, c.Axis.By)} {
					at.Add(at, more)
				}
				each(at, c.Coord+i*c.Turn+j*c.Outer.On+n*c.Axis.On)
			}
		}
	}
}

// want is what Sum must answer.
func want(mem []byte, c *Cells, k *Key) (Digest, error) {
	var d Digest
	if c.Count == 0 || c.Outer.N == 0 || c.Axis.N == 0 {
		return d, nil
	}
	fits := c.Outer.N*c.Axis.N*uint64(k.cell) <= uint64(len(mem)) // and do not overlap
	if !fits {
		return Digest{}, driver.ErrBounds
	}
	cells(c, func(at *big.Int, coord uint64) {
		end := new(big.Int).Add(at, big.NewInt(int64(k.cell)))
		if fits = fits && end.Cmp(big.NewInt(int64(len(mem)))) <= 0; fits {
			d.Add(defined(k, mem[at.Int64():end.Int64()], coord))
		}
	})
	if !fits {
		return Digest{}, driver.ErrBounds
	}
	return d, nil
}

// agree compares Sum, every way of it and the reference with the definition.
func agree(t *testing.T, mem []byte, c *Cells, k *Key) {
	t.Helper()
	expect, refused := want(mem, c, k)
	for name, f := range implementations {
		got, err := f(mem, c, k)
		require.Equal(t, refused, err, "%s: %+v, cells of %d bytes", name, c, k.cell)
		require.Equal(t, expect, got, "%s: %+v, cells of %d bytes", name, c, k.cell)
	}
}

var implementations = map[string]func([]byte, *Cells, *Key) (Digest, error){
	"sum": Sum, "reference": Reference}

func key(t testing.TB, cell uint64) *Key {
	t.Helper()
	k, err := NewKey(Seed{1, 2, 3}, "k", "bf16", cell)
	require.NoError(t, err)
	return k
}

// TestEverySize: cells of every size at every alignment, flush with either end of the memory.
func TestEverySize(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, atEnd := range []bool{false, true} {
		mem := guarded(t, 2000, atEnd)
		fill(rng, mem)
		for size := 1; size <= 700; size++ {
			k := key(t, uint64(size))
			for _, base := range []int{0, rng.IntN(64), len(mem) - size} {
				agree(t, mem, &Cells{At: driver.Side{Base: uint64(base)}, Count: 1,
					Outer: Axis{N: 1}, Axis: Axis{N: 1}, Coord: rng.Uint64()}, k)
			}
		}
	}
}

func fill(rng *rand.Rand, mem []byte) {
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
}

// TestRuns: many cells of random sizes, strides, lists and slots of several entries.
func TestRuns(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for round := range 150 {
		size := uint64(1 + rng.IntN(200))
		if round%40 == 0 {
			size = 4000 + rng.Uint64N(3000)
		}
		c := &Cells{Count: 1 + rng.IntN(30), Coord: rng.Uint64(), Turn: rng.Uint64(),
			Outer: Axis{1 + rng.Uint64N(5), size + rng.Uint64N(100), rng.Uint64()},
			Axis:  Axis{1 + rng.Uint64N(20), size * rng.Uint64N(3), rng.Uint64()}}
		c.At = driver.Side{Base: rng.Uint64N(300), Stride: rng.Uint64N(4000)}
		if c.At.Per = rng.Uint32N(4); c.At.Per > 1 {
			c.At.First, c.At.Step = rng.Uint32N(c.At.Per), rng.Uint64N(900)
		}
		if rng.IntN(3) > 0 {
			c.At.List = make([]uint32, int(c.At.First)+c.Count)
			for i := range c.At.List {
				c.At.List[i] = rng.Uint32N(20)
			}
		}
		last := big.NewInt(0)
		cells(c, func(at *big.Int, _ uint64) {
			if at.Cmp(last) > 0 {
				last = at
			}
		})
		mem := guarded(t, max(int(last.Int64()), int((c.Outer.N*c.Axis.N-1)*size))+int(size),
			round%2 == 0)
		fill(rng, mem)
		agree(t, mem, c, key(t, size))
		agree(t, mem[:len(mem)-1], c, key(t, size)) // the furthest cell leaves it
	}
}

// FuzzSum: what leaves the memory is driver.ErrBounds and is not read; the rest is summed.
func FuzzSum(f *testing.F) {
	for _, b := range [][]byte{{}, {1}, {255, 254, 253}, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9}} {
		f.Add(b, uint16(100), uint16(16))
	}
	f.Fuzz(func(t *testing.T, b []byte, length, size uint16) {
		if size == 0 || length == 0 {
			return
		}
		at := 0
		small := func(n uint64) uint64 {
			at++
			if at > len(b) {
				return 1 % n
			}
			return uint64(b[at-1]) % n
		}
		large := func() uint64 { // small, or near what overflows
			n := small(256)
			switch n % 8 {
			case 0:
				return -n / 8
			case 1:
				return 1<<63 - 4 + n/8
			case 2:
				return 1<<32 - 4 + n/8
			}
			return n * small(64)
		}
		c := &Cells{Count: int(small(20)), Coord: large(), Turn: large(),
			Outer: Axis{small(6), large(), large()}, Axis: Axis{small(6), large(), large()},
			At: driver.Side{Base: large(), Stride: large(), Step: large(), Per: uint32(small(4))}}
		if c.At.Per > 1 {
			c.At.First = uint32(small(uint64(c.At.Per)))
		}
		if small(2) == 1 {
			c.At.List = make([]uint32, int(c.At.First)+c.Count)
			for i := range c.At.List {
				c.At.List[i] = uint32(large())
			}
		}
		mem := guarded(t, int(length), length%2 == 0)
		fill(rand.New(rand.NewPCG(uint64(length), 0)), mem)
		agree(t, mem, c, key(t, uint64(size)))
	})
}

// TestRefused: lists that are too short, numbers of cells that overflow, and no memory.
func TestRefused(t *testing.T) {
	mem, k := make([]byte, 100), key(t, 4)
	good := Cells{Count: 2, Outer: Axis{N: 1}, Axis: Axis{N: 1},
		At: driver.Side{Stride: 4, List: []uint32{1, 2}}}
	for name, change := range map[string]func(c *Cells){
		"count below 0":    func(c *Cells) { c.Count = -1 },
		"count too large":  func(c *Cells) { c.Count, c.At.List = 1<<40, nil },
		"list too short":   func(c *Cells) { c.Count = 3 },
		"no list":          func(c *Cells) { c.At.List = []uint32{} },
		"first without":    func(c *Cells) { c.At.First = 1 },
		"first too large":  func(c *Cells) { c.At.First, c.At.Per = 2, 2 },
		"outer too large":  func(c *Cells) { c.Outer.N = 1 << 63 },
		"axis too large":   func(c *Cells) { c.Axis.N = 1 << 63 },
		"cells too many":   func(c *Cells) { c.Outer.N, c.Axis.N = 1<<33, 1<<31 },
		"cells in cells":   func(c *Cells) { c.Outer.N = 26 },
		"slot outside":     func(c *Cells) { c.At.List[1] = 25 },
		"slot far outside": func(c *Cells) { c.At.List[1] = 1<<32 - 1 },
	} {
		c := good
		c.At.List = []uint32{1, 2}
		change(&c)
		for way, f := range implementations {
			got, err := f(mem, &c, k)
			require.ErrorIs(t, err, driver.ErrBounds, "%s: %s", way, name)
			require.Zero(t, got)
		}
	}
	for way, f := range implementations {
		_, err := f(nil, &good, k)
		require.ErrorIs(t, err, driver.ErrBounds, way)
		got, err := f(nil, &Cells{}, k)
		require.NoError(t, err)
		require.Zero(t, got)
	}
	for _, size := range []uint64{0, CellMax + 1} {
		_, err := NewKey(Seed{}, "k", "bf16", size)
		require.Error(t, err)
	}
}

// TestKeys: seed, part, dtype and size each change the key; parts share the words.
func TestKeys(t *testing.T) {
	base := key(t, 64)
	other := func(seed Seed, part, dtype string, cell uint64) *Key {
		k, err := NewKey(seed, part, dtype, cell)
		require.NoError(t, err)
		require.NotEqual(t, base.s, k.s)
		return k
	}
	require.Equal(t, base.words, other(Seed{1, 2, 3}, "v", "bf16", 64).words)
	for _, k := range []*Key{other(Seed{1, 2, 4}, "k", "bf16", 64), other(Seed{1, 2, 3}, "k", "fp8",
		64), other(Seed{1, 2, 3}, "k", "bf16", 63)} {
		require.NotEqual(t, base.words, k.words)
	}
}

// TestGolden: other programs compute the same digests of this version.
func TestGolden(t *testing.T) {
	mem := make([]byte, 3*20)
	for i := range mem {
		mem[i] = byte(i)
	}
	k, err := NewKey(Seed{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, "latent", "fp8",
		20)
	require.NoError(t, err)
	c := &Cells{At: driver.Side{Stride: 20}, Count: 3, Turn: 1, Coord: 7<<52 | 1<<32 | 100,
		Outer: Axis{N: 1}, Axis: Axis{N: 1}}
	agree(t, mem, c, k)
	d, err := Sum(mem, c, k)
	require.NoError(t, err)
	require.Equal(t, Digest{0xaee524b43eb576f9, 0xcbee70ec36d81a3b, 3}, d)
}

func TestSumDoesNotAllocate(t *testing.T) {
	mem, k := make([]byte, 4096), key(t, 100)
	list := []uint32{3, 1}
	require.Zero(t, testkit.AllocsPerRun(100, func() {
		c := Cells{At: driver.Side{Stride: 1000, List: list}, Count: 2, Outer: Axis{N: 2, By: 200},
			Axis: Axis{N: 2, By: 100}}
		_, _ = Sum(mem, &c, k)
	}))
}

// TestListThatChanges: slots that change during a call leave the memory never.
func TestListThatChanges(t *testing.T) {
	mem, k := guarded(t, 64<<10, true), key(t, 64)
	list := make([]uint32, 512)
	c := &Cells{At: driver.Side{Stride: 64, List: list}, Count: len(list), Outer: Axis{N: 1},
		Axis: Axis{N: 1}}
	var wait sync.WaitGroup
	defer wait.Wait()
	stop := make(chan struct{})
	defer close(stop)
	wait.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for i := range list {
				atomic.AddUint32(&list[i], 1023)
			}
		}
	})
	for range 2000 {
		if _, err := Sum(mem, c, k); err != nil {
			require.ErrorIs(t, err, driver.ErrBounds)
		}
	}
}

// TestFaults sums cells of memory of which the last page is protected.
func TestFaults(t *testing.T) {
	const n = 1 << 16
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	require.NoError(t, unix.Mprotect(mem[n-4096:], unix.PROT_NONE))
	k := key(t, 64)
	for count, want := range map[int]error{n/64 - 64: nil, n / 64: driver.ErrFault} {
		c := &Cells{At: driver.Side{Stride: 64}, Count: count, Outer: Axis{N: 1}, Axis: Axis{N: 1}}
		for _, f := range []func([]byte, *Cells, *Key) (Digest, error){Sum, Reference} {
			if _, err := f(mem, c, k); !errors.Is(err, want) {
				t.Errorf("%d cells: %v, want %v", count, err, want)
			}
		}
	}
}
