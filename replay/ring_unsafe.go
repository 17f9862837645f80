// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// ringLayers: one layer is handed over while the next one is filled.
const ringLayers = 2

var pageBytes = uint64(unix.Getpagesize())

// newRing makes the memory of a prefill that streams. It has memory only for a few layers: the
// n-th layer of a region lies, with all blocks, in slot n modulo their number. The slots are mapped
// repeatedly, one behind the other, so that the sender sees whole pools in layer-major order. A
// slot may be filled again once its layer has landed at the peer. Peers cannot map this memory,
// since the same pages appear several times in it. They need not: only the initiator accesses it.
func newRing(eng *engine.Engine, side *layout.Side) (*pools, error) {
	m := &pools{side: side, poison: prefillPoison, rings: [][]byte{}}
	for i, area := range side.Regions {
		layers := layersOn(side, i)
		slot := area.Bytes / uint64(len(layers))
		for _, v := range side.Views {
			last := v.Base + uint64(side.Groups[v.Group].Blocks-1)*v.Block
			end := last + uint64(v.Tokens)*v.Token
			at := uint64(slices.Index(layers, v.Layer)) * slot
			if v.Region == i && (v.Base < at || end > at+slot || slot%pageBytes != 0) {
				return m, fmt.Errorf("region %s is not layer-major: it cannot be streamed: %w",
					area.Name, layout.ErrGeometry)
			}
		}
		mem, err := mapRing(slot, len(layers))
		if err != nil {
			return m, fmt.Errorf("map memory for %d layers: %w", ringLayers, err)
		}
		m.rings = append(m.rings, mem)
		r, err := eng.Register(area.Name, driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)),
			Mem: mem})
		if err != nil {
			return m, err
		}
		m.regions = append(m.regions, r)
	}
	return m, nil
}

// mapRing maps the slots in turn, so many of them one behind the other.
func mapRing(slot uint64, count int) ([]byte, error) {
	fd, err := unix.MemfdCreate("sluice-replay", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) // the mappings keep the memory
	if err := unix.Ftruncate(fd, int64(slot)*ringLayers); err != nil {
		return nil, err
	}
	size := uintptr(slot) * uintptr(count)
	base, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|
		unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	for i := range count {
		at := unsafe.Add(base, uintptr(slot)*uintptr(i))
		_, err := unix.MmapPtr(fd, int64(slot)*int64(i%ringLayers), at, uintptr(slot),
			unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
		if err != nil {
			return nil, errors.Join(err, unix.MunmapPtr(base, size))
		}
	}
	return unsafe.Slice((*byte)(base), size), nil
}

func unmapRing(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
}
