// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
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

// device opens the stand-in as a card of that compute capability.
func device(t *testing.T, compute string) *Device {
	t.Helper()
	t.Setenv("STANDIN_COMPUTE", compute)
	d, err := OpenDevice(DeviceOptions{Library: library(t)})
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// memory is that of the card, or pinned memory of the host, with those bytes.
func memory(t *testing.T, d *Device, pinned bool, content []byte) *Memory {
	t.Helper()
	var m *Memory
	var err error
	if pinned {
		buf, allocErr := hostmem.Alloc(uint64(max(len(content), 1)),
			hostmem.Options{Purpose: "test"})
		if allocErr != nil {
			t.Fatal(allocErr)
		}
		t.Cleanup(func() { _ = buf.Close() })
		m, err = d.Pin(buf.Bytes())
	} else {
		m, err = d.Alloc(uint64(max(len(content), 1)))
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, m.WriteAt(content, 0))
	return m
}

func span(m *Memory, n int) Span { return Span{m, 0, uint64(n)} }

// onDevice is the same Move with its memories on a card and in pinned memory.
func onDevice(t *testing.T, d *Device, m *hostMove, hostDst bool) *Move {
	t.Helper()
	c := &Move{Count: m.Count, Dst: deviceIndex(t, d, &m.Dst), Src: deviceIndex(t, d, &m.Src)}
	for _, p := range m.Parts {
		c.Parts = append(c.Parts, Part{Entry: p.Entry, DstStride: p.DstStride,
			SrcStride: p.SrcStride,
			Dst:       span(memory(t, d, hostDst, p.Dst), len(p.Dst)),
			Src:       span(memory(t, d, !hostDst, p.Src), len(p.Src))})
	}
	return c
}

func deviceIndex(t *testing.T, d *Device, x *hostIndex) Index {
	t.Helper()
	var b []byte
	switch {
	case x.U64 != nil:
		for _, v := range x.U64 {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
	case x.U32 != nil:
		for _, v := range x.U32 {
			b = binary.LittleEndian.AppendUint32(b, v)
		}
	default:
		return Index{}
	}
	return Index{span(memory(t, d, false, b), len(b)), x.U64 != nil}
}

// TestDeviceEqualsALoop: the whole way of a Move through loader, module, launch and kernel,
// over the stand-in, comes to what a loop of copies does.
func TestDeviceEqualsALoop(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for _, c := range []struct {
		compute, kernel string
		sizes           []int
	}{
		{"90", KernelAsync, []int{656}}, {"90", KernelRows, []int{656}},
		{"80", KernelAsync, []int{584}}, {"90", KernelRows, []int{584}},
		{"90", KernelRows, []int{656, 132}}, {"90", KernelAsync, []int{656, 132}},
		{"90", KernelAsync, []int{1152, 16}}, {"90", "", []int{656}},
	} {
		t.Run(fmt.Sprint(c.compute, c.kernel, c.sizes), func(t *testing.T) {
			d := device(t, c.compute)
			for kinds := range 9 {
				m := draw(rng, c.sizes, 16*(kinds%2), 150, kinds/3, kinds%3)
				dm := onDevice(t, d, m, kinds%2 == 0)
				want, wantErr := obvious(m)
				got, l, err := d.Run(dm, Budget{SMs: 2}, c.kernel)
				if got != want || err != wantErr || l.Kernel != c.kernel && c.kernel != "" &&
					!onCard() {
					t.Fatalf("%+v, %v by %s, want %+v, %v by %s", got, err, l.Kernel, want, wantErr,
						c.kernel)
				}
				for k, p := range m.Parts {
					b := make([]byte, len(p.Dst))
					if err := dm.Parts[k].Dst.Memory.ReadAt(b, 0); err != nil ||
						!bytes.Equal(b, p.Dst) {
						t.Fatalf("lists %d: part %d differs from the loop's, %v", kinds, k, err)
					}
				}
			}
		})
	}
}

// TestDeviceCountsAfresh: what one Move left out is not counted by the next, nor after one that
// failed.
func TestDeviceCountsAfresh(t *testing.T) {
	d := device(t, "90")
	bad := onDevice(t, d, &hostMove{Count: 3, Src: hostIndex{U32: []uint32{0, Skip32, 99}},
		Parts: []hostPart{{Entry: 16, Dst: make([]byte, 48), Src: make([]byte, 48)}}}, false)
	good := onDevice(t, d,
		&hostMove{Count: 3, Parts: []hostPart{{Entry: 16, Dst: make([]byte, 48),
			Src: make([]byte, 48)}}},
		false)
	for range 3 {
		if got, _, err := d.Run(bad, Budget{SMs: 1}, KernelRows); err != driver.ErrBounds ||
			got != (Tally{Moved: 1, Skipped: 1, Bad: 1, FirstBad: 2}) {
			t.Errorf("%+v, %v", got, err)
		}
		for range 2 {
			if got, _, err := d.Run(good, Budget{SMs: 1}, KernelRows); err != nil ||
				got != (Tally{Moved: 3}) {
				t.Errorf("%+v, %v", got, err)
			}
		}
	}
}

func TestDeviceRunDoesNotAllocate(t *testing.T) {
	d := device(t, "90")
	m := onDevice(t, d, draw(rand.New(rand.NewPCG(1, 1)), []int{656}, 0, 10, 0, 1), false)
	if n := testkit.AllocsPerRun(500, func() { _, _, _ = d.Run(m, Budget{SMs: 1}, "") }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// TestDeviceFromOtherThreads: a context is current for a thread, and goroutines move.
func TestDeviceFromOtherThreads(t *testing.T) {
	d := device(t, "90")
	m := onDevice(t, d, draw(rand.New(rand.NewPCG(2, 1)), []int{656}, 0, 10, 0, 0), false)
	done := make(chan error)
	for range 4 {
		go func() {
			runtime.LockOSThread() // and end the thread with it
			_, _, err := d.Run(m, Budget{SMs: 1}, "")
			done <- err
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestDeviceThatIsMissing(t *testing.T) {
	path := library(t)
	device(t, "90") // loads the library
	cases := []struct{ name, variable, value, want string }{
		{"no device", "STANDIN_DEVICES", "0", "no device"},
		{"old driver", "STANDIN_DRIVER", "11000", "driver 11080 are the least"},
		{"old card", "STANDIN_COMPUTE", "75", "this is 7.5"},
	}
	if onCard() {
		cases = nil // a card is there, and not old
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv(c.variable, c.value)
			_, err := OpenDevice(DeviceOptions{Library: path})
			var u *driver.UnavailableError
			if !errors.As(err, &u) || u.Fix == "" || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an UnavailableError with %q", err, c.want)
			}
		})
	}
	var u *driver.UnavailableError
	for _, o := range []DeviceOptions{{Library: path, Ordinal: 77}, {Library: path, Ordinal: -1},
		{Library: "another.so"}} {
		if _, err := OpenDevice(o); !errors.As(err, &u) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestDeviceRefuses(t *testing.T) {
	d, other := device(t, "90"), device(t, "90")
	good := func() *Move {
		return &Move{Count: 4, Parts: []Part{{Entry: 16,
			Dst: span(memory(t, d, false, make([]byte, 64)), 64),
			Src: span(memory(t, d, true, make([]byte, 64)), 64)}}}
	}
	cases := []struct {
		name  string
		spoil func(m *Move)
		b     Budget
		want  error
	}{
		{"closed", func(m *Move) {
			_ = m.Parts[0].Src.Memory.Close()
		}, Budget{SMs: 1}, driver.ErrClosed},
		{"no memory", func(m *Move) {
			m.Parts[0].Dst = Span{}
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"past the end", func(m *Move) {
			m.Parts[0].Dst.N++
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"wraps", func(m *Move) {
			m.Parts[0].Dst.Off = ^uint64(0)
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"odd", func(m *Move) {
			m.Parts[0].Dst.Off, m.Parts[0].Dst.N = 1, 60
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"short list", func(m *Move) {
			m.Src.List = span(memory(t, d, false, make([]byte, 12)), 12)
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"odd list", func(m *Move) {
			m.Src.List = Span{memory(t, d, false, make([]byte, 40)), 2, 32}
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"another device's", func(m *Move) {
			m.Parts[0].Src.Memory = memory(t, other, false, make([]byte, 64))
		}, Budget{SMs: 1}, driver.ErrBounds},
		{"no budget", func(*Move) {}, Budget{}, driver.ErrBounds},
	}
	for _, c := range cases {
		m := good()
		if _, _, err := d.Run(m, Budget{SMs: 1}, ""); err != nil {
			t.Fatalf("%s: %v before", c.name, err)
		}
		c.spoil(m)
		if got, _, err := d.Run(m, c.b, ""); !errors.Is(err, c.want) || got != (Tally{}) {
			t.Errorf("%s: %+v, %v, want %v", c.name, got, err, c.want)
		}
	}
	var e *gpu.Error
	if _, err := d.Alloc(1 << 50); !errors.As(err, &e) || e.Result != 2 {
		t.Errorf("too much memory: %v", err)
	}
}

func TestDeviceClose(t *testing.T) {
	d := device(t, "90")
	mem, err := d.Alloc(8192) // which is still open when the device is closed
	require.NoError(t, err)
	m := &Move{Count: 1, Parts: []Part{{Dst: span(mem, 4096),
		Src: Span{mem, 4096, 4096}, Entry: 656}}}
	if !onCard() && (d.card != (Card{90, 12040, 4, 227 << 10}) ||
		!strings.Contains(d.Name(), "stand-in")) {
		t.Errorf("%+v, %s", d.card, d.Name())
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Alloc(1); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("%v", err)
	}
	for _, only := range []string{KernelRows, KernelAsync} {
		_, _, err := d.Run(m, Budget{SMs: 1}, only)
		require.ErrorIs(t, err, driver.ErrClosed)
	}
	if left := hostmem.InUse()["cuda-tally"]; left != 0 {
		t.Errorf("%d bytes left", left)
	}
}
