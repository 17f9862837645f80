// SPDX-License-Identifier: Apache-2.0

// Package keys is what memory is known by: the small numbers that descriptors name
// it with, whose epochs go on when a number is used again, and the tokens that peers
// show.
package keys

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/backends"
)

// Owner names a backend.
type Owner [8]byte

// NewOwner draws a name.
func NewOwner() (id Owner) {
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	return id
}

// Token is what a peer must show: the secret, key, epoch and size, and a digest
// that tells a damaged or foreign token from an old one. How to reach the bytes
// is not in it: that the owner tells who shows the secret, so nobody else learns
// it, and a token stays short.
type Token struct {
	Secret [16]byte
	Key    uint32
	Epoch  uint64
	Size   uint64
}

// Limit bounds the keys of a backend: all are below.
const Limit = 1 << 20

// checkBytes is enough for the right words: what a token opens the owner decides,
// who compares the secret. 2,048 regions fit in 64 KiB with it.
const checkBytes = 2

// Append writes the token of an owner's memory.
func (t *Token) Append(dst []byte, owner *Owner) []byte {
	start := len(dst)
	dst = append(dst, t.Secret[:]...)
	dst = binary.AppendUvarint(dst, uint64(t.Key))
	dst = binary.AppendUvarint(dst, t.Epoch)
	dst = binary.AppendUvarint(dst, t.Size)
	sum := check(dst[start:], owner)
	return append(dst, sum[:]...)
}

func check(body []byte, owner *Owner) (sum [checkBytes]byte) {
	var buf [64]byte
	digest := sha256.Sum256(append(append(buf[:0], owner[:]...), body...))
	copy(sum[:], digest[:])
	return sum
}

// Decode reads what passes for a token of an owner. The error wraps
// backends.ErrBadToken.
func Decode(b []byte, owner *Owner) (t Token, err error) {
	if len(b) < 16+3+checkBytes || len(b) > 16+5+10+10+checkBytes {
		return t, fmt.Errorf("token of %d bytes: %w", len(b), backends.ErrBadToken)
	}
	body, sum := b[:len(b)-checkBytes], b[len(b)-checkBytes:]
	if want := check(body, owner); subtle.ConstantTimeCompare(want[:], sum) != 1 {
		return t, fmt.Errorf("token is damaged or another backend's: %w", backends.ErrBadToken)
	}
	copy(t.Secret[:], body)
	var numbers [3]uint64
	rest := body[16:]
	for i := range numbers {
		value, n := binary.Uvarint(rest)
		if n <= 0 {
			return t, fmt.Errorf("token is cut: %w", backends.ErrBadToken)
		}
		numbers[i], rest = value, rest[n:]
	}
	if len(rest) > 0 || numbers[0] >= Limit || numbers[2] == 0 {
		return t, fmt.Errorf("token of key %d, %d bytes: %w", numbers[0], numbers[2], backends.ErrBadToken)
	}
	t.Key, t.Epoch, t.Size = uint32(numbers[0]), numbers[1], numbers[2]
	return t, nil
}
