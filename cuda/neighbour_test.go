// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/allocs"
)

// TestNeighbourOnDeviceReadsAll: every word of the memory is in the sum of some thread.
func TestNeighbourOnDeviceReadsAll(t *testing.T) {
	device(t, "90") // loads the library
	const words = 2048*5 + 3
	n, err := OpenNeighbour(DeviceOptions{Library: library(t)}, 16*words)
	require.NoError(t, err)
	defer n.Close()
	content := random(rand.New(rand.NewPCG(51, 52)), 16*words)
	require.NoError(t, n.d.Write(n.args.weights, content))
	for range 2 {
		require.NoError(t, n.Step())
	}
	threads := int(n.blocks) * stepThreads
	got := make([]byte, 4*threads)
	require.NoError(t, n.d.Read(got, n.args.out))
	for thread := range threads {
		want := uint32(0)
		for i := thread; i < words; i += threads {
			for range stepRounds {
				for w := range 4 {
					want = want*1664525 + binary.LittleEndian.Uint32(content[16*i+4*w:])
				}
			}
		}
		if sum := binary.LittleEndian.Uint32(got[4*thread:]); sum != want {
			t.Fatalf("thread %d: %d, want %d", thread, sum, want)
		}
	}
	if allocs := allocs.PerRun(20, func() { _ = n.Step() }); allocs != 0 {
		t.Errorf("%v allocations, want 0", allocs)
	}
}

// TestNeighbourOnDeviceBesideMoves is for the race detector, and for what they share of a driver.
func TestNeighbourOnDeviceBesideMoves(t *testing.T) {
	d := device(t, "90")
	n, err := OpenNeighbour(DeviceOptions{Library: library(t)}, 16*100)
	require.NoError(t, err)
	defer n.Close()
	m := draw(rand.New(rand.NewPCG(1, 3)), []int{656}, 0, 100, 0, 1)
	dm := onDevice(t, d, m, false)
	done := make(chan error)
	go func() {
		var err error
		for range 50 {
			err = errors.Join(err, n.Step())
		}
		done <- err
	}()
	for range 20 {
		sameAsTwin(t, d, dm, m, Budget{SMs: 1}, VariantRows)
		sameAsTwin(t, d, dm, m, Budget{}, VariantLoop)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestNeighbourOnDeviceRefuses(t *testing.T) {
	device(t, "90")
	o := DeviceOptions{Library: library(t)}
	for _, bytes := range []uint64{0, 24} {
		if _, err := OpenNeighbour(o, bytes); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%d bytes: %v", bytes, err)
		}
	}
	var e *gpu.Error
	if _, err := OpenNeighbour(o, 1<<50); !errors.As(err, &e) ||
		!strings.Contains(err.Error(), "open a neighbour on device 0") {
		t.Errorf("too much memory: %v", err)
	}
	n, err := OpenNeighbour(o, 160)
	require.NoError(t, err)
	for range 2 {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := n.Step(); err != driver.ErrClosed {
		t.Errorf("closed: %v", err)
	}
}
