// SPDX-License-Identifier: Apache-2.0

package object

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// A pack is an object, in little-endian:
//
//	blocks   one behind the other, each as Config.Seal has made it
//	index    a record of 56 bytes for each block
//	footer   magic, version, records, bytes of the blocks, number, when it was written, CRC-32C of
//	         the index, CRC-32C of the footer
//
// A tombstone is a pack without blocks, whose records name those that were removed.
const (
	packMagic   = "sluiceKO"
	packVersion = 1
	recordBytes = 56
	footerBytes = 48
	tailBytes   = 64 << 10 // that are read first of an object, for its index
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// blockID names a block.
type blockID struct {
	space [16]byte
	key   cache.Key
}

// place is where a block lies in its pack.
type place struct {
	cache.BelowBlock
	offset, stored uint32
}

// record is an entry of an index.
type record struct {
	blockID
	place
}

func (r *record) append(p []byte) []byte {
	p = append(append(p, r.space[:]...), r.key[:]...)
	for _, n := range [...]uint32{r.offset, r.stored, r.Size, r.CRC, r.Used, 0} {
		p = binary.LittleEndian.AppendUint32(p, n)
	}
	return p
}

func (r *record) read(p []byte) {
	copy(r.space[:], p)
	copy(r.key[:], p[16:])
	for k, n := range [...]*uint32{&r.offset, &r.stored, &r.Size, &r.CRC, &r.Used} {
		*n = binary.LittleEndian.Uint32(p[32+4*k:])
	}
}

// footer is the end of an object.
type footer struct {
	records  int
	blocks   int64 // bytes
	number   uint64
	written  int64 // seconds of the wall clock
	indexCRC uint32
}

// finish appends an index and a footer to the blocks of a pack.
func finish(p []byte, records []record, number uint64, written int64) []byte {
	f := footer{records: len(records), blocks: int64(len(p)), number: number, written: written}
	for k := range records {
		p = records[k].append(p)
	}
	f.indexCRC = crc32.Checksum(p[f.blocks:], castagnoli)
	at := len(p)
	p = append(p, packMagic...)
	p = binary.LittleEndian.AppendUint32(p, packVersion)
	p = binary.LittleEndian.AppendUint32(p, uint32(f.records))
	p = binary.LittleEndian.AppendUint64(p, uint64(f.blocks))
	p = binary.LittleEndian.AppendUint64(p, f.number)
	p = binary.LittleEndian.AppendUint64(p, uint64(f.written))
	p = binary.LittleEndian.AppendUint32(p, f.indexCRC)
	return binary.LittleEndian.AppendUint32(p, crc32.Checksum(p[at:], castagnoli))
}

// readFooter reads the footer of an object of so many bytes, of which p are the last ones.
func readFooter(p []byte, size int64) (f footer, err error) {
	if len(p) < footerBytes {
		return f, notPack("it has %d bytes", size)
	}
	p = p[len(p)-footerBytes:]
	version := binary.LittleEndian.Uint32(p[8:])
	f = footer{int(binary.LittleEndian.Uint32(p[12:])), int64(binary.LittleEndian.Uint64(p[16:])),
		binary.LittleEndian.Uint64(p[24:]), int64(binary.LittleEndian.Uint64(p[32:])),
		binary.LittleEndian.Uint32(p[40:])}
	switch {
	case string(p[:8]) != packMagic:
		return f, notPack("no footer at its end")
	case binary.LittleEndian.Uint32(p[44:]) != crc32.Checksum(p[:44], castagnoli):
		return f, notPack("the CRC of its footer does not fit")
	case version != packVersion:
		return f, notPack("version %d, this program reads %d", version, packVersion)
	case f.records > removedMax || f.number > math.MaxInt64:
		return f, notPack("%d blocks, number %d: no program writes such", f.records, f.number)
	case f.blocks < 0 || f.blocks > math.MaxUint32 || f.blocks+f.indexBytes() != size:
		return f, notPack("it has %d bytes, and not those that its footer says", size)
	}
	return f, nil
}

// indexBytes is the length of index and footer.
func (f *footer) indexBytes() int64 { return int64(f.records)*recordBytes + footerBytes }

// readIndex reads the records of a pack from its last bytes.
func (f *footer) readIndex(tail []byte) ([]record, error) {
	p := tail[int64(len(tail))-f.indexBytes() : len(tail)-footerBytes]
	if crc32.Checksum(p, castagnoli) != f.indexCRC {
		return nil, notPack("the CRC of its index does not fit")
	}
	records := make([]record, f.records)
	for k := range records {
		r := &records[k]
		r.read(p[k*recordBytes:])
		if int64(r.offset)+int64(r.stored) > f.blocks {
			return nil, notPack("a block ends behind the blocks")
		}
	}
	return records, nil
}

var errNotPack = errors.New("no object of this tier")

func notPack(format string, args ...any) error {
	return fmt.Errorf("%w: %s: %w", errNotPack, fmt.Sprintf(format, args...), engine.ErrCorrupt)
}
