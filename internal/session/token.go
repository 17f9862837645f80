// SPDX-License-Identifier: Apache-2.0

package session

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/sluicehq/sluice/driver"
)

// Owner names a backend.
type Owner [8]byte

// NewOwner draws a name.
func NewOwner() (id Owner) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}

// Token is what a peer must show: the secret, key, epoch and size, and a check
// that tells a damaged or foreign token from an old one. How to reach the bytes
// is not in it: that the owner tells a peer that shows the secret, so no other learns
// it, and a token stays short.
type Token struct {
	Secret [16]byte
	Key    uint32
	Epoch  uint64
	Size   uint64
}

// KeyLimit bounds the keys of a backend: all are below.
const KeyLimit = 1 << 20

// checkBytes is enough for the right words: what a token opens the owner decides,
// who compares the secret. 2,048 regions fit in 64 KiB with it.
const tokenCheckBytes = 2

// Append writes the token of an owner's memory.
func (t *Token) Append(dst []byte, owner *Owner) []byte {
	start := len(dst)
	dst = append(dst, t.Secret[:]...)
	dst = binary.AppendUvarint(dst, uint64(t.Key))
	dst = binary.AppendUvarint(dst, t.Epoch)
	dst = binary.AppendUvarint(dst, t.Size)
	return binary.LittleEndian.AppendUint16(dst, tokenCheck(dst[start:], owner))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// check is a CRC-32C folded to two bytes: every bit of a token counts, and of the owner. A
// peer that has a token can compute it, as it could any digest without a key.
func tokenCheck(body []byte, owner *Owner) uint16 {
	sum := crc32.Update(crc32.Checksum(owner[:], castagnoli), castagnoli, body)
	return uint16(sum>>16 ^ sum)
}

// DecodeToken reads what passes for a token of an owner. The error wraps
// driver.ErrBadToken.
func DecodeToken(b []byte, owner *Owner) (t Token, err error) {
	if len(b) < 16+3+tokenCheckBytes || len(b) > 16+5+10+10+tokenCheckBytes {
		return t, fmt.Errorf("token of %d bytes: %w", len(b), driver.ErrBadToken)
	}
	body, sum := b[:len(b)-tokenCheckBytes], binary.LittleEndian.Uint16(b[len(b)-tokenCheckBytes:])
	if tokenCheck(body, owner) != sum {
		return t, fmt.Errorf("token is damaged or another backend's: %w", driver.ErrBadToken)
	}
	copy(t.Secret[:], body)
	var numbers [3]uint64
	rest := body[16:]
	for i := range numbers {
		value, n := binary.Uvarint(rest)
		if n <= 0 {
			return t, fmt.Errorf("token is cut: %w", driver.ErrBadToken)
		}
		numbers[i], rest = value, rest[n:]
	}
	if len(rest) > 0 || numbers[0] >= KeyLimit || numbers[2] == 0 {
		return t, fmt.Errorf("token of key %d, %d bytes: %w", numbers[0], numbers[2],
			driver.ErrBadToken)
	}
	t.Key, t.Epoch, t.Size = uint32(numbers[0]), numbers[1], numbers[2]
	return t, nil
}
