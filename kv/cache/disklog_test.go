// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/sluicehq/sluice/internal/testing/machine"
)

// What the kernel's dm-log-writes puts on its second disk: a head of one sector, and then each
// request, a sector of its own before its bytes. A write stands there only once a flush that
// came behind it has ended, or at once where it was one through all caches; so what stands before
// a mark is what a disk has that loses all that was not flushed then.
const (
	logMagic   = 0x6a736677736872
	logDiscard = 1 << 2
	logMark    = 1 << 3
	logHead    = 32 // bytes of an entry before a mark's text
)

// replayLog applies the log in file to a disk that held zeros, and calls at with each mark's text
// as it comes to it.
func replayLog(file string, to io.WriterAt, at func(mark string) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	var head [28]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return err
	}
	entries, sector := binary.LittleEndian.Uint64(head[16:]),
		int64(binary.LittleEndian.Uint32(head[24:]))
	if binary.LittleEndian.Uint64(head[:]) != logMagic || sector < machine.Sector {
		return errors.New("no log of dm-log-writes")
	}
	pos := sector
	for i := range entries {
		entry := make([]byte, sector)
		if _, err := f.ReadAt(entry, pos); err != nil {
			return fmt.Errorf("entry %d of %d: %w", i, entries, err)
		}
		pos += sector
		word := func(at int) int64 { return int64(binary.LittleEndian.Uint64(entry[at:])) }
		off, n, flags, text := word(0)*sector, word(8)*sector, word(16), word(24)
		switch {
		case flags&logMark != 0:
			mark := string(bytes.TrimRight(entry[logHead:][:text], "\x00"))
			if err := at(mark); err != nil {
				return fmt.Errorf("at mark %q: %w", mark, err)
			}
			continue
		case flags&logDiscard != 0:
			if err := put(to, bytes.NewReader(make([]byte, n)), off); err != nil {
				return err
			}
			continue
		}
		if err := put(to, io.NewSectionReader(f, pos, n), off); err != nil {
			return err
		}
		pos += n
	}
	return nil
}

func put(to io.WriterAt, from io.Reader, off int64) error {
	_, err := io.Copy(io.NewOffsetWriter(to, off), from)
	return err
}
