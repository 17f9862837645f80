// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/layout"
)

// staging is the block pool of the prefill process. It has memory only for a few layers, the slots:
// layer l of all blocks lies in slot l modulo their number. The slots are mapped repeatedly, one
// after the other, so that the sender sees a whole pool in layer-major order. A slot may be filled
// again once its layer has been written to the peer.
type staging struct {
	geometry *layout.Geometry
	slots    int
	mem      []byte
}

// stagingSlots: one layer is pushed while the next one is filled.
const stagingSlots = 2

// newStaging allocates a pool for requests of up to so many blocks.
func newStaging(p *Plan, blocks uint64) (*staging, error) {
	g, err := stagingGeometry(p, blocks)
	if err != nil {
		return nil, err
	}
	s := &staging{geometry: g, slots: stagingSlots}
	slot := g.PoolBytes() / uint64(g.Layers())
	fd, err := unix.MemfdCreate("sluice-staging", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make staging memory: %w", err)
	}
	defer unix.Close(fd) // the mappings keep the memory
	if err := unix.Ftruncate(fd, int64(slot)*stagingSlots); err != nil {
		return nil, fmt.Errorf("make staging memory of %d bytes: %w", slot*stagingSlots, err)
	}
	if s.mem, err = mapRing(fd, slot, stagingSlots, g.Layers()); err != nil {
		return nil, fmt.Errorf("map staging memory: %w", err)
	}
	return s, nil
}

// stagingGeometry rounds the blocks up until a layer is a whole number of pages.
func stagingGeometry(p *Plan, blocks uint64) (*layout.Geometry, error) {
	g, err := p.geometry(max(blocks, 1), layout.LayerMajor)
	if err != nil {
		return nil, err
	}
	page := uint64(unix.Getpagesize())
	step := uint64(1)
	for step*g.LayerBytes()%page != 0 {
		step *= 2
	}
	n := (g.Blocks() + step - 1) / step * step
	g, err = p.geometry(n, layout.LayerMajor)
	if err == nil && g.PoolBytes() != n*g.BlockBytes() {
		err = errors.New("a layer-major pool has gaps: staging cannot map it")
	}
	return g, err
}

// segment returns the whole pool as a segment to register. Peers cannot map this memory, since the
// same pages appear several times in it. They need not: only the initiator accesses it.
func (s *staging) segment() driver.Segment {
	return driver.Segment{Kind: driver.DRAM, Len: uint64(len(s.mem)), Mem: s.mem}
}

// piece returns the bytes of one part of a layer of a block.
func (s *staging) piece(block uint64, layer, part int) ([]byte, error) {
	r, err := s.geometry.Piece(block, layer, part)
	if err != nil {
		return nil, err
	}
	return s.mem[r.Off : r.Off+r.Len : r.Off+r.Len], nil
}

func (s *staging) close() error { return unmapRing(s.mem) }
