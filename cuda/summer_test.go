// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// standIn is where the software stand-in of libcuda is built, once: a process opens one driver.
var standIn struct {
	once    sync.Once
	library *standin.Library
	err     error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if standIn.library != nil {
		standIn.library.Remove()
	}
	os.Exit(code)
}

// onCard says whether SLUICE_LIBCUDA names the libcuda of a machine with a card, which these
// tests then run on: hack/gpu-check does so.
func onCard() bool { return os.Getenv("SLUICE_LIBCUDA") != "" }

// library builds the stand-in of libcuda and returns its path.
func library(t *testing.T) string {
	t.Helper()
	if !onCard() {
		tool(t, "gcc", "apt-get install gcc libc6-dev")
	}
	return libraryOf(t)
}

func libraryOf(t testing.TB) string {
	t.Helper()
	if onCard() {
		return os.Getenv("SLUICE_LIBCUDA")
	}
	standIn.once.Do(func() {
		if standIn.library, standIn.err = standin.BuildCUDA(); standIn.err == nil {
			standIn.err = os.Setenv("STANDIN_PANEL", standIn.library.Panel)
		}
	})
	if standIn.err != nil {
		t.Fatal(standIn.err)
	}
	return standIn.library.Path
}

// summer opens one on a card, or on the stand-in as one of compute capability 8.0.
func summer(t *testing.T, b Budget) *Summer {
	t.Helper()
	t.Setenv("STANDIN_COMPUTE", "80")
	s, err := OpenSummer(library(t), 0, b)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// onDevice puts bytes into memory of the summer's card and returns their address.
func onDevice(t *testing.T, s *Summer, content []byte) uint64 {
	t.Helper()
	at, err := s.d.Alloc(uint64(len(content)))
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := s.d.Free(at); err != nil && !errors.Is(err, driver.ErrClosed) {
			t.Error(err)
		}
	})
	require.NoError(t, s.d.Write(at, content))
	return at
}

func keyOf(t *testing.T, part string, cell uint64) *digest.Key {
	t.Helper()
	k, err := digest.NewKey(digest.Seed{1, 2}, part, "bf16", cell)
	require.NoError(t, err)
	return k
}

// held is cells on a card, and the same bytes on the host.
type held struct {
	host []byte
	on   digest.DeviceCells
}

// cellSizes are those of the presets and of states, and some that nothing divides.
var cellSizes = []uint64{1, 2, 4, 12, 16, 64, 128, 130, 132, 256, 448, 512, 576, 584, 656, 1024,
	1152}

// anyCells draws cells that lie in a memory of the size that they take, at addresses that are
// multiples of unit.
func anyCells(t *testing.T, r *rand.Rand, s *Summer, cell, unit uint64) held {
	t.Helper()
	up := func(n uint64) uint64 { return (n + unit - 1) / unit * unit }
	c := digest.Cells{Count: 1 + r.IntN(20), Coord: r.Uint64(), Turn: r.Uint64(),
		Axis: digest.Axis{N: 1 + r.Uint64N(20), By: up(cell) + unit*r.Uint64N(3), On: r.Uint64()}}
	c.Outer = digest.Axis{N: 1 + r.Uint64N(4), By: c.Axis.N*c.Axis.By + unit*r.Uint64N(9),
		On: r.Uint64()}
	if r.IntN(2) == 0 { // heads apart, tokens side by side
		c.Outer, c.Axis = c.Axis, c.Outer
	}
	c.At = driver.Side{Base: unit * r.Uint64N(4), Stride: unit * r.Uint64N(5000)}
	if c.At.Per = r.Uint32N(4); c.At.Per > 1 {
		c.At.First, c.At.Step = r.Uint32N(c.At.Per), unit*r.Uint64N(900)
	}
	if r.IntN(3) > 0 {
		c.At.List = make([]uint32, int(c.At.First)+c.Count)
		for i := range c.At.List {
			c.At.List[i] = r.Uint32N(20)
		}
	}
	n := c.At.Base + cell + (c.Outer.N-1)*c.Outer.By + (c.Axis.N-1)*c.Axis.By
	var far uint64
	for i := range uint64(c.Count) {
		per := max(1, uint64(c.At.Per))
		slot, in := (uint64(c.At.First)+i)/per, (uint64(c.At.First)+i)%per
		if c.At.List != nil {
			slot = uint64(c.At.List[slot])
		}
		far = max(far, slot*c.At.Stride+in*c.At.Step)
	}
	n += far
	host := random(r, int(n))
	return held{host, digest.DeviceCells{Key: keyOf(t, "k", cell), Cells: c,
		Memory: digest.DeviceMemory{Addr: onDevice(t, s, host), Len: n}}}
}

func (h *held) want(t *testing.T) digest.Digest {
	t.Helper()
	want, err := digest.Sum(h.host, &h.on.Cells, h.on.Key)
	require.NoError(t, err)
	again, err := digest.Reference(h.host, &h.on.Cells, h.on.Key)
	require.NoError(t, err)
	require.Equal(t, again, want)
	return want
}

// TestSummerOnDeviceSumsAsTheCPU: cells of every size and alignment, several kinds by one call.
func TestSummerOnDeviceSumsAsTheCPU(t *testing.T) {
	s := summer(t, Budget{SMs: 2})
	r := rand.New(rand.NewPCG(61, 62))
	var all []digest.DeviceCells
	var total digest.Digest
	for _, cell := range cellSizes {
		for _, unit := range []uint64{1, 2, 4, 8, 16} {
			h := anyCells(t, r, s, cell, unit)
			want := h.want(t)
			got, err := s.Sum([]digest.DeviceCells{h.on})
			require.NoError(t, err)
			require.Equal(t, want, got, "%d bytes, multiples of %d: %+v", cell, unit, h.on.Cells)
			all, total = append(all, h.on), sumOf(total, want)
		}
	}
	require.Greater(t, len(all), launchMost, "too few for a second launch")
	got, err := s.Sum(all)
	require.NoError(t, err)
	require.Equal(t, total, got)
	got, err = s.Sum(nil)
	require.NoError(t, err)
	require.Zero(t, got)
}

func sumOf(a, b digest.Digest) digest.Digest {
	a.Add(b)
	return a
}

// TestSummerOnDeviceSplitsLists: a list longer than the room goes by parts, and so do the largest
// keys.
func TestSummerOnDeviceSplitsLists(t *testing.T) {
	s := summer(t, Budget{SMs: 1})
	r := rand.New(rand.NewPCG(63, 64))
	for _, per := range []uint32{0, 3} {
		h := held{host: random(r, 64)}
		at := onDevice(t, s, h.host)
		list := make([]uint32, roomBytes/4+1000)
		for i := range list {
			list[i] = r.Uint32N(10)
		}
		h.on = digest.DeviceCells{Memory: digest.DeviceMemory{Addr: at, Len: 64},
			Key: keyOf(t, "k", 2), Cells: digest.Cells{Count: len(list), Coord: 5, Turn: 7,
				At:    driver.Side{Stride: 4, List: list, Per: per},
				Outer: digest.Axis{N: 1}, Axis: digest.Axis{N: 1}}}
		if per > 1 {
			h.on.Cells.At.First, h.on.Cells.At.Step = 2, 5
			h.on.Cells.Count = int(per)*len(list) - 3
		}
		large := held{host: random(r, digest.CellMax)}
		at = onDevice(t, s, large.host)
		large.on = digest.DeviceCells{Key: keyOf(t, "k", digest.CellMax),
			Memory: digest.DeviceMemory{Addr: at, Len: digest.CellMax},
			Cells:  digest.Cells{Count: 1, Outer: digest.Axis{N: 1}, Axis: digest.Axis{N: 1}}}
		got, err := s.Sum([]digest.DeviceCells{large.on, h.on, large.on})
		require.NoError(t, err)
		require.Equal(t, sumOf(large.want(t), sumOf(h.want(t), large.want(t))), got)
	}
}

// TestSummerOnDeviceRefuses: what leaves the memory is driver.ErrBounds, whether the host sees it
// or the kernel, and the next sum is right.
func TestSummerOnDeviceRefuses(t *testing.T) {
	s := summer(t, Budget{})
	r := rand.New(rand.NewPCG(65, 66))
	for range 60 {
		h := anyCells(t, r, s, 132, 4)
		want, one := h.want(t), []digest.DeviceCells{h.on}
		for name, change := range map[string]func(c *digest.DeviceCells){
			"a byte less": func(c *digest.DeviceCells) { c.Memory.Len-- },
			"a slot":      func(c *digest.DeviceCells) { farSlot(&c.Cells, 1<<31) },
			"a slot that overflows": func(c *digest.DeviceCells) {
				c.Cells.At.Stride = 1 << 63
				farSlot(&c.Cells, 2)
			},
			"no list": func(c *digest.DeviceCells) {
				c.Cells.At.List, c.Cells.Count = []uint32{}, 1
			},
			"base": func(c *digest.DeviceCells) { c.Cells.At.Base = math.MaxUint64 - 100 },
			"column": func(c *digest.DeviceCells) {
				c.Cells.Axis = digest.Axis{N: 2, By: 1 << 63}
			},
			"row": func(c *digest.DeviceCells) {
				c.Cells.Outer = digest.Axis{N: 3, By: 1 << 63}
			},
			"the grid": func(c *digest.DeviceCells) { c.Cells.Outer.N = 1 << 50 },
			"step": func(c *digest.DeviceCells) {
				c.Cells.At.Per, c.Cells.At.First, c.Cells.At.Step = 4, 3, 1<<63+1
			},
			"addresses": func(c *digest.DeviceCells) { c.Memory.Addr = math.MaxUint64 - 64 },
		} {
			bad := h.on
			change(&bad)
			got, err := s.Sum([]digest.DeviceCells{h.on, bad})
			require.ErrorIs(t, err, driver.ErrBounds, "%s: %+v", name, bad)
			require.Zero(t, got)
		}
		other := h.on
		other.Memory.Device = 1
		_, err := s.Sum([]digest.DeviceCells{other})
		require.ErrorIs(t, err, driver.ErrNotSupported)
		got, err := s.Sum(one)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Zero(t, testkit.AllocsPerRun(5, func() { _, _ = s.Sum(one) }))
	}
}

// farSlot has the cells begin in a slot that no memory has.
func farSlot(c *digest.Cells, slot uint32) {
	c.At.List, c.At.Stride = make([]uint32, 3+c.Count), max(1, c.At.Stride)
	c.At.List[int(c.At.First)/int(max(1, c.At.Per))] = slot
}

// TestSummerOnDeviceEnds: by several goroutines, and closed.
func TestSummerOnDeviceEnds(t *testing.T) {
	s := summer(t, Budget{SMs: 1})
	r := rand.New(rand.NewPCG(67, 68))
	var all sync.WaitGroup
	for range 4 {
		h := anyCells(t, r, s, 656, 16)
		want := h.want(t)
		all.Go(func() {
			for range 20 {
				got, err := s.Sum([]digest.DeviceCells{h.on})
				if err != nil || got != want {
					t.Errorf("%+v, %v, want %+v", got, err, want)
				}
			}
		})
	}
	all.Wait()
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	_, err := s.Sum(nil)
	require.ErrorIs(t, err, driver.ErrClosed)
}

// TestSummerOnDeviceNeedsACard names what is too old, and leaves nothing behind.
func TestSummerOnDeviceNeedsACard(t *testing.T) {
	path := library(t)
	t.Setenv("STANDIN_COMPUTE", "75")
	if !onCard() {
		_, err := OpenSummer(path, 0, Budget{})
		var missing *driver.UnavailableError
		require.ErrorAs(t, err, &missing)
		require.Contains(t, missing.Reason, "7.5")
		t.Setenv("STANDIN_COMPUTE", "80")
		t.Setenv("STANDIN_REFUSES", "80")
		_, err = OpenSummer(path, 0, Budget{})
		var refused *gpu.Error
		require.ErrorAs(t, err, &refused)
	}
	_, err := OpenSummer(path, 77, Budget{})
	var missing *driver.UnavailableError
	require.ErrorAs(t, err, &missing)
}
