// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/seal"
)

// A disk of a cache with Config.Seal has each block and each record sealed: a block by the number
// of its record, its key and its namespace, a record by its number, both by the id of the file. So
// what was moved, or is of another file or of a block before, does not open. A record is longer
// (sealedRecord), so that none lies in two sectors; a block takes seal.Overhead bytes more of its
// place. What does not open is left out of memory as zeros, which its CRC-32C then finds: Damaged.
const (
	sealedVersion = 3
	sealedRecord  = 128
	recordFields  = 48 // bytes of a record that say something
)

// length is how many granules a block takes on the disk.
func (d *disk) length(size uint64) uint32 {
	if d.seal != nil {
		size += seal.Overhead
	}
	return granules(size)
}

// run is how many bytes are written and read for a block. Those behind a sealed one say nothing.
func (d *disk) run(size uint32) uint64 {
	if d.seal != nil {
		return uint64(d.length(uint64(size))) * granule
	}
	return uint64(size)
}

// costOf is what a block takes of a budget: whole pages, and its record.
func (d *disk) costOf(size uint64) uint64 { return uint64(d.length(size))*granule + d.each }

// about is what the seal of a record is over.
func (d *disk) about(n uint32) []byte {
	return binary.LittleEndian.AppendUint32(append(make([]byte, 0, 52), d.id[:]...), n)
}

// aboutBlock is what the seal of the block of a record is over.
func (c *Cache) aboutBlock(d *disk, n, i uint32) []byte {
	e := c.index.entry(i)
	space := c.spaces.digest(e.space)
	return append(append(d.about(n), e.key[:]...), space[:]...)
}

// stage is memory in which blocks lie sealed on their way to a disk, and from it.
type stage struct {
	number int
	memory *engine.Memory
	region *engine.Region
}

// stagesMax bounds the stages of a disk, each of which a transfer has at a time: four reads go on
// while blocks are sealed or opened.
const stagesMax = 5

// lostMax is how many of them may be lost to transfers without a proof before the disk is used no
// more.
const lostMax = stagesMax

// openStages makes room for the stages of a disk; they have memory once they are needed.
func (d *disk) openStages() {
	d.stages = make(chan *stage, stagesMax)
	for n := range stagesMax {
		d.stages <- &stage{number: n}
	}
}

// takeStage waits for a stage that has room for so many blocks of a length, and returns where they
// lie in it; nil: the disk is not sealed. Who has it gives it back to d.stages.
func (c *Cache) takeStage(ctx context.Context, d *disk, blocks int, size uint32) (s *stage,
	slots []uint32, err error) {
	if d.seal == nil {
		return nil, nil, nil
	}
	d.mu.Lock()
	lost := len(d.lost)
	d.mu.Unlock()
	if lost >= lostMax {
		return nil, nil, fmt.Errorf("%d transfers of sealed blocks were given up, and have their "+
			"memory still: restart the process: %w", lost, engine.ErrBusy)
	}
	select {
	case s = <-d.stages:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	need := uint64(blocks) * d.run(size)
	if s.region == nil || uint64(len(s.memory.Bytes())) < need {
		if err = s.close(); err == nil {
			s.memory, err = c.cfg.Engine.Alloc(max(need, batchBytes),
				engine.AllocOptions{Purpose: "sealed blocks"})
		}
		if err == nil {
			s.region, err = c.cfg.Engine.RegisterPrivate(fmt.Sprintf("cache disk %x, sealed %d",
				d.id[:8], s.number), s.memory.Segment())
		}
		if err != nil {
			d.stages <- s
			return nil, nil, err
		}
	}
	for k := range blocks {
		slots = append(slots, uint32(k)*d.length(uint64(size)))
	}
	return s, slots, nil
}

// giveStage gives a stage back, once no transfer moves in it. Where there is no proof of that the
// disk has another one in its place.
func (d *disk) giveStage(s *stage, proved bool) {
	switch {
	case s == nil:
	case proved:
		d.stages <- s
	default:
		d.mu.Lock()
		d.lost = append(d.lost, s)
		n := stagesMax + len(d.lost)
		d.mu.Unlock()
		d.stages <- &stage{number: n}
	}
}

// closeStages is of a disk that nothing uses any more.
func (d *disk) closeStages() error {
	for len(d.stages) > 0 {
		d.lost = append(d.lost, <-d.stages)
	}
	for len(d.lost) > 0 {
		if err := d.lost[len(d.lost)-1].close(); err != nil {
			return err
		}
		d.lost = d.lost[:len(d.lost)-1]
	}
	return nil
}

func (s *stage) close() error {
	if s.region != nil {
		if err := s.region.Close(); err != nil {
			return err
		}
		s.region = nil
	}
	if s.memory == nil {
		return nil
	}
	err := s.memory.Close()
	s.memory = nil
	return err
}

// sealTo seals the blocks of a job into a stage. Memory that is gone, as somebody cut the file, is
// an error.
func (c *Cache) sealTo(d *disk, s *stage, slots []uint32, j *job) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	for k, w := range j.blocks {
		at := s.memory.Bytes()[uint64(slots[k])*granule:]
		d.seal.Seal(at[:0], c.memory.bytesOf(j.slots[k], j.size),
			c.aboutBlock(d, j.records[k], w.i))
	}
	return nil
}

// openFrom opens blocks that were read into a stage: block k of entry list[k] and its record.
func (c *Cache) openFrom(d *disk, s *stage, from, to, list, records []uint32, size uint32) (
	err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	for k, i := range list {
		sealed := s.memory.Bytes()[uint64(from[k])*granule:][:size+seal.Overhead]
		plain := c.memory.bytesOf(to[k], size)
		if _, err := d.seal.Open(plain[:0], sealed, c.aboutBlock(d, records[k], i)); err != nil {
			clear(plain) // it may be another block's place by now
		}
	}
	return nil
}

// readRecord returns the fields of a record that has the right sum.
func (d *disk) readRecord(n uint32, p, room []byte) (fields []byte, err error) {
	if d.seal == nil {
		return p, nil
	}
	return d.seal.Open(room[:0], p[:recordFields+seal.Overhead], d.about(n))
}

// unopened is the error of a disk none of whose records opens.
func (d *disk) unopened(n int, why error) error {
	return errors.Join(fmt.Errorf("none of its %d blocks opens: name the key file that they were "+
		"sealed by, or remove the file of the disk", n), why)
}
