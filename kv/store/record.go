// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/engine"
)

// The file, all numbers little-endian:
//
//	0        header: magic, version, geometry, id, CRC-32C
//	4 KiB    records of 64 bytes, none of which lies across a sector
//	dataOff  blocks, each at a multiple of 4 KiB
//
// Records go through the page cache and blocks mostly past it, so the two never share
// what the cache keeps together: dataOff is a multiple of 2 MiB.
const (
	version     = 1
	headerBytes = 4 << 10
	recordBytes = 64
	blockAlign  = 4 << 10
	dataAlign   = 2 << 20

	headerUsed = 8 + 8 + 8 + 8 + 32 + 16 // before the CRC
	recordUsed = recordBytes - 4
)

var magic = [8]byte{'s', 'l', 'u', 'i', 'c', 'e', 'K', 'V'}

// Stride is the distance from one block to the next: BlockBytes in whole pages.
func (g Geometry) Stride() uint64 { return (g.BlockBytes + blockAlign - 1) &^ (blockAlign - 1) }

func (g *Geometry) dataOff() uint64 {
	return (headerBytes + g.Blocks*recordBytes + dataAlign - 1) &^ (dataAlign - 1)
}

func (g *Geometry) fileBytes() uint64 { return g.dataOff() + g.Blocks*g.Stride() }

// header is the first page.
type header struct {
	geo Geometry
	id  [16]byte
}

func newHeader(g Geometry) header {
	h := header{geo: g}
	_, _ = rand.Read(h.id[:]) // never fails: it ends the program instead
	return h
}

func (h *header) encode() []byte {
	p := append(make([]byte, 0, headerBytes), magic[:]...)
	p = binary.LittleEndian.AppendUint64(p, version)
	p = binary.LittleEndian.AppendUint64(p, h.geo.BlockBytes)
	p = binary.LittleEndian.AppendUint64(p, h.geo.Blocks)
	p = append(p, h.geo.Tag[:]...)
	p = append(p, h.id[:]...)
	p = binary.LittleEndian.AppendUint32(p, digest.CRC32C(p))
	return p[:headerBytes]
}

func readHeader(f *os.File) (h header, err error) {
	p := make([]byte, headerBytes)
	if _, err := f.ReadAt(p, 0); err != nil {
		if err == io.EOF {
			err = fmt.Errorf("the file is too short for a store: %w", engine.ErrCorrupt)
		}
		return h, err
	}
	if !bytes.Equal(p[:8], magic[:]) {
		return h, fmt.Errorf("the file is no store: %w", engine.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint64(p[8:]); v != version {
		return h, fmt.Errorf("the store has version %d, this program knows %d: %w", v, version,
			engine.ErrVersion)
	}
	if digest.CRC32C(p[:headerUsed]) != binary.LittleEndian.Uint32(p[headerUsed:]) {
		return h, fmt.Errorf("the store's header is damaged: %w", engine.ErrCorrupt)
	}
	h.geo.BlockBytes, h.geo.Blocks = binary.LittleEndian.Uint64(p[16:]),
		binary.LittleEndian.Uint64(p[24:])
	copy(h.geo.Tag[:], p[32:])
	copy(h.id[:], p[64:])
	return h, h.geo.check()
}

// encode appends a record. That of an empty block is zeros, or has no bytes and the last number
// that the store gave before the block became empty. Its CRC covers the store's id and the block's
// number, so a record is of use in its own place alone.
func (b *Block) encode(dst []byte, id [16]byte, i uint32) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, recordBytes)...)
	p := dst[start:]
	if b.Seq == 0 {
		return dst
	}
	copy(p, b.Name[:])
	binary.LittleEndian.PutUint64(p[16:], b.Seq)
	binary.LittleEndian.PutUint64(p[24:], b.Len)
	binary.LittleEndian.PutUint32(p[32:], b.Sum)
	binary.LittleEndian.PutUint32(p[recordUsed:], recordSum(p[:recordUsed], id, i))
	return dst
}

func recordSum(p []byte, id [16]byte, i uint32) uint32 {
	var place [20]byte
	copy(place[:], id[:])
	binary.LittleEndian.PutUint32(place[16:], i)
	return digest.UpdateCRC32C(digest.CRC32C(place[:]), p)
}

// decode reads a record; one that is damaged is zeros.
func decode(p []byte, g *Geometry, id [16]byte, i uint32) (b Block) {
	if binary.LittleEndian.Uint32(p[recordUsed:]) != recordSum(p[:recordUsed], id, i) {
		return Block{}
	}
	copy(b.Name[:], p)
	b.Seq, b.Len = binary.LittleEndian.Uint64(p[16:]), binary.LittleEndian.Uint64(p[24:])
	b.Sum = binary.LittleEndian.Uint32(p[32:])
	switch {
	case b.Len > g.BlockBytes:
		return Block{}
	case b.Len == 0:
		return Block{Seq: b.Seq}
	}
	return b
}

// write puts a record into its place, with one call.
func (s *Store) write(i uint32, b Block) error {
	var buf [recordBytes]byte
	if _, err := s.f.WriteAt(b.encode(buf[:0], s.id, i),
		headerBytes+int64(i)*recordBytes); err != nil {
		return fmt.Errorf("write the record of block %d: %w", i, err)
	}
	return nil
}

// readTable reads all records.
func (s *Store) readTable() error {
	s.blocks = make([]Block, s.geo.Blocks)
	buf := make([]byte, min(1<<20, s.geo.Blocks*recordBytes))
	perRead := uint64(len(buf)) / recordBytes
	for first := uint64(0); first < s.geo.Blocks; first += perRead {
		n := min(perRead, s.geo.Blocks-first)
		if _, err := s.f.ReadAt(buf[:n*recordBytes],
			headerBytes+int64(first)*recordBytes); err != nil {
			return fmt.Errorf("read records: %w", err)
		}
		for k := range n {
			b := decode(buf[k*recordBytes:][:recordBytes], &s.geo, s.id, uint32(first+k))
			s.seq = max(s.seq, b.Seq)
			if b.Len > 0 {
				s.blocks[first+k] = b
			}
		}
	}
	return nil
}
