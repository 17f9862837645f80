// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/sluicehq/sluice/driver"
)

// token is what a peer must show: the secret, key and epoch, and four bytes that
// tell a damaged or foreign token from an old one. It takes 23 bytes as a rule,
// so that thousands of regions fit in a description. The bounds are not among
// them: an epoch of a key has one set of bounds, in the key table, and the tag
// there is a digest over secret and bounds, so neither can be had without the other.
type token struct {
	secret [16]byte
	key    uint32
	epoch  uint64
}

const checkBytes = 4

func (t *token) append(dst []byte, owner *[16]byte) []byte {
	start := len(dst)
	dst = append(dst, t.secret[:]...)
	dst = binary.AppendUvarint(dst, uint64(t.key))
	dst = binary.AppendUvarint(dst, t.epoch)
	return binary.LittleEndian.AppendUint32(dst, tokenCheck(dst[start:], owner))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// tokenCheck is a CRC-32C: it tells damage, and keeps no secret.
func tokenCheck(body []byte, owner *[16]byte) uint32 {
	return crc32.Update(crc32.Checksum(owner[:], castagnoli), castagnoli, body)
}

func decodeToken(b []byte, owner *[16]byte) (t token, err error) {
	if len(b) < 16+1+1+checkBytes || len(b) > 16+5+10+checkBytes {
		return t, fmt.Errorf("token of %d bytes: %w", len(b), driver.ErrBadToken)
	}
	body, check := b[:len(b)-checkBytes], binary.LittleEndian.Uint32(b[len(b)-checkBytes:])
	if tokenCheck(body, owner) != check {
		return t, fmt.Errorf("token is damaged or another backend's: %w", driver.ErrBadToken)
	}
	copy(t.secret[:], body)
	key, n := binary.Uvarint(body[16:])
	if n <= 0 || key > 1<<20 {
		return t, fmt.Errorf("token without a key: %w", driver.ErrBadToken)
	}
	epoch, m := binary.Uvarint(body[16+n:])
	if m <= 0 || 16+n+m != len(body) {
		return t, fmt.Errorf("token without an epoch: %w", driver.ErrBadToken)
	}
	t.key, t.epoch = uint32(key), epoch
	return t, nil
}

// tagOf is what the table holds about a key: it proves a token without telling
// the secret, and binds it to the grant.
func tagOf(secret *[16]byte, key uint32, g *grant) (tag [16]byte) {
	var b [64]byte
	copy(b[:], secret[:])
	binary.LittleEndian.PutUint32(b[16:], key)
	binary.LittleEndian.PutUint32(b[20:], g.arena)
	binary.LittleEndian.PutUint32(b[24:], g.flags)
	binary.LittleEndian.PutUint64(b[32:], g.off)
	binary.LittleEndian.PutUint64(b[40:], g.size)
	binary.LittleEndian.PutUint64(b[48:], g.base)
	digest := sha256.Sum256(b[:])
	copy(tag[:], digest[:])
	return tag
}

// open checks a token against a table and returns what it grants.
func (t *token) open(tab *table) (grant, error) {
	if t.key >= tab.keys {
		return grant{}, fmt.Errorf("token of key %d: %w", t.key, driver.ErrBadToken)
	}
	epoch, tag, g, ok := tab.read(t.key)
	if !ok || t.epoch < epoch {
		return grant{}, fmt.Errorf("token of epoch %d, the memory is at %d: %w",
			t.epoch, epoch, driver.ErrRevoked)
	}
	want := tagOf(&t.secret, t.key, &g)
	if t.epoch > epoch || subtle.ConstantTimeCompare(tag[:], want[:]) != 1 {
		return grant{}, fmt.Errorf("token of key %d does not fit: %w", t.key, driver.ErrBadToken)
	}
	if g.flags&flagForeign == 0 && g.arena >= tab.keys {
		return grant{}, fmt.Errorf("key %d lies in arena %d of %d: %w", t.key, g.arena, tab.keys,
			driver.ErrCorrupt)
	}
	return g, nil
}
