// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// fetched sends the extents of the arena that a token opens: id, token. Only an
// error of the connection is returned.
func (c *inbound) fetched(body []byte) error {
	if len(body) < 4 {
		return fmt.Errorf("question of %d bytes: %w", len(body), driver.ErrCorrupt)
	}
	id := binary.LittleEndian.Uint32(body)
	a, err := c.b.openArena(body[4:])
	if err == nil {
		err = c.lend(id, a)
		c.b.mu.Lock()
		c.b.releaseArena(a)
		c.b.mu.Unlock()
	}
	if err != nil {
		return c.say(answerHead(id, statusOf(err)), nil)
	}
	return nil
}

// openArena checks a token with the secret itself, and returns a reference.
func (b *Backend) openArena(tok []byte) (*arena, error) {
	t, err := decodeToken(tok, &b.address.id)
	if err != nil {
		return nil, err
	}
	if _, err := t.open(&b.table); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.memory(t.key)
	if m == nil || subtle.ConstantTimeCompare(m.secret[:], t.secret[:]) != 1 {
		return nil, driver.ErrRevoked
	}
	if m.arena == nil {
		return nil, driver.ErrBounds
	}
	m.arena.refs++
	return m.arena, nil
}

// lend sends the extents. Pages stay where they are only while their descriptors are
// duplicated: a peer that does not read its socket holds up no Revoke.
func (c *inbound) lend(id uint32, a *arena) error {
	extents, generation, err := a.duplicates(&c.b.table)
	fds, index := descriptors(extents)
	defer closeAll(fds)
	if err != nil {
		return err
	}
	if len(fds) > fdsMax || len(extents) > extentsMax {
		return fmt.Errorf("shared memory in %d descriptors, %d extents: %w",
			len(fds), len(extents), driver.ErrFull)
	}
	return c.sendExtents(id, a.size, generation, extents, fds, index)
}

// duplicates returns the extents with descriptors of the caller's, and their generation.
func (a *arena) duplicates(t *table) (extents []driver.Extent, generation uint64, err error) {
	own := make(map[int]int)
	err = a.shared.Lend(func(lent []driver.Extent) error {
		generation = t.generation(a.index).Load()
		for _, e := range lent {
			fd, ok := own[e.FD]
			if !ok {
				if fd, err = unix.FcntlInt(uintptr(e.FD), unix.F_DUPFD_CLOEXEC, 0); err != nil {
					return duplicateError(err)
				}
				own[e.FD] = fd
			}
			e.FD = fd
			extents = append(extents, e)
		}
		return nil
	})
	return extents, generation, err
}

// duplicateError is ErrFull where this process has no descriptor left: the peer may ask again.
func duplicateError(errno error) error {
	err := fmt.Errorf("duplicate descriptor: %w", os.NewSyscallError("fcntl", errno))
	if errors.Is(errno, unix.EMFILE) {
		err = fmt.Errorf("%w: %w", err, driver.ErrFull)
	}
	return err
}

func (c *inbound) sendExtents(
	id uint32, size, generation uint64, extents []driver.Extent, fds []int, index map[int]uint32,
) error {
	for first := 0; first < len(extents); first += extentsPart {
		part := extents[first:min(first+extentsPart, len(extents))]
		msg := binary.LittleEndian.AppendUint64(answerHead(id, statusOK), generation)
		msg = binary.LittleEndian.AppendUint64(msg, size)
		msg = binary.LittleEndian.AppendUint32(msg, uint32(len(extents)))
		msg = binary.LittleEndian.AppendUint32(msg, uint32(len(part)))
		for _, e := range part {
			msg = binary.LittleEndian.AppendUint64(msg, e.Off)
			msg = binary.LittleEndian.AppendUint64(msg, e.Len)
			msg = binary.LittleEndian.AppendUint64(msg, e.FDOff)
			msg = binary.LittleEndian.AppendUint32(msg, index[e.FD])
		}
		if err := c.say(msg, fds); err != nil {
			c.drop()
			return nil // the connection has ended: there is nothing to tell
		}
		fds = nil // they travel once
	}
	return nil
}

// descriptors lists each descriptor once.
func descriptors(extents []driver.Extent) (fds []int, index map[int]uint32) {
	index = make(map[int]uint32)
	for _, e := range extents {
		if _, ok := index[e.FD]; !ok {
			index[e.FD] = uint32(len(fds))
			fds = append(fds, e.FD)
		}
	}
	return fds, index
}

// answerHead begins an answer; a refusal is padded to the length of a part's head.
func answerHead(id uint32, s status) []byte {
	msg := binary.LittleEndian.AppendUint32([]byte{msgExtents}, id)
	msg = append(msg, byte(s), 0, 0, 0)
	if s != statusOK {
		msg = append(msg, make([]byte, 24)...)
	}
	return msg
}

func (c *inbound) say(msg []byte, fds []int) error {
	return send(c.sock, c.b.cfg.DialTimeout, msg, fds)
}
