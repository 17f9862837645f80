// SPDX-License-Identifier: Apache-2.0

// Package seal encrypts blocks for a disk or an object store, so that who reads it learns only how
// many there are and how long, and what was changed, moved, or put there by others does not open.
//
// A sealed block is Overhead bytes longer than the block: the ciphertext and the tag of
// XAES-256-GCM (https://c2sp.org/XAES-256-GCM: AES-256-GCM by a key that the first half of a nonce
// of 24 bytes derives), the nonce, and the id of the key. The tag is also over what the caller says
// the block is about, such as its name and where it lies: with anything else it does not open.
//
// No nonce comes twice: its first half is drawn as the key file is read, its second half counts the
// blocks. So a process must not go on twice from one snapshot of it, as of a virtual machine.
package seal

import (
	"bufio"
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Overhead is how many bytes Seal adds to a block.
const Overhead = tagBytes + nonceBytes + idBytes

const (
	keyBytes   = 32
	tagBytes   = 16
	nonceBytes = 24
	halfNonce  = nonceBytes / 2
	idBytes    = 4

	keysMax    = 16
	fileMax    = 64 << 10
	derivedMax = 1 << 10 // first halves of nonces whose keys are kept
)

// Keys are the keys of a file. Its methods may be called by any goroutine.
type Keys struct {
	path   string
	keys   []key
	half   [halfNonce]byte // of the nonces of what is sealed here
	sealer cipher.AEAD
	sealed atomic.Uint64 // blocks

	mu      sync.RWMutex
	derived map[[idBytes + halfNonce]byte]cipher.AEAD
}

type key struct {
	id    [idBytes]byte
	block cipher.Block
	mask  [aes.BlockSize]byte // K1 of CMAC
}

// ReadKeys reads a key file: from 1 to 16 lines of 64 hexadecimal digits each, such as "openssl
// rand -hex 32" prints, and comments, which begin with #. The first key seals, all open. A key is
// changed by a new one before it, and leaves once nothing is there any more that it has sealed. The
// file must be readable by its user and group alone.
func ReadKeys(path string) (*Keys, error) {
	k := &Keys{path: path, derived: map[[idBytes + halfNonce]byte]cipher.AEAD{}}
	text, err := ReadSecret(path)
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		secret, err := hex.DecodeString(line)
		if err != nil || len(secret) != keyBytes { // an error of hex would show digits
			return nil, fmt.Errorf("key file %s, line %d: want %d hexadecimal digits, as of "+
				"\"openssl rand -hex %d\": %w", path, n, 2*keyBytes, keyBytes, driver.ErrBounds)
		}
		add := newKey(secret)
		if slices.ContainsFunc(k.keys, func(o key) bool { return o.id == add.id }) {
			return nil, fmt.Errorf("key file %s, line %d: the key is there twice: %w", path, n,
				driver.ErrBounds)
		}
		k.keys = append(k.keys, add)
	}
	if err := lines.Err(); err != nil || len(k.keys) == 0 || len(k.keys) > keysMax {
		return nil, fmt.Errorf("key file %s: %d keys, want from 1 to %d: %w", path, len(k.keys),
			keysMax, driver.ErrBounds)
	}
	_, _ = rand.Read(k.half[:]) // never fails: it ends the program instead
	k.sealer = k.keys[0].derive(k.half[:])
	return k, nil
}

// ReadSecret reads a file that its user and its group alone may read, of 1 byte to 64 KiB.
func ReadSecret(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe has nobody wait
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat() // of what is read, whatever takes its name meanwhile
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() == 0 || info.Size() > fileMax:
		return nil, fmt.Errorf("%s is no file of 1 byte to %d KiB: %w", path, fileMax>>10,
			driver.ErrBounds)
	case info.Mode().Perm()&0o027 != 0:
		return nil, fmt.Errorf("others may read %s, or its group may write it: chmod 600: %w",
			path, os.ErrPermission)
	}
	text, err := io.ReadAll(io.LimitReader(f, fileMax+1))
	if err == nil && (len(text) == 0 || len(text) > fileMax) {
		err = fmt.Errorf("%s changed as it was read: %w", path, driver.ErrBounds)
	}
	return text, err
}

func newKey(secret []byte) (k key) {
	sum := sha256.Sum256(append([]byte("id of a sealing key "), secret...))
	copy(k.id[:], sum[:])
	k.block, _ = aes.NewCipher(secret) // fails for other lengths alone
	k.block.Encrypt(k.mask[:], k.mask[:])
	carry := byte(0)
	for i, b := range slices.Backward(k.mask[:]) {
		k.mask[i], carry = b<<1|carry, b>>7
	}
	k.mask[len(k.mask)-1] ^= carry * 0x87
	return k
}

// derive returns the cipher of all nonces of one first half.
func (k *key) derive(half []byte) cipher.AEAD {
	var sub [keyBytes]byte
	for i := range 2 {
		m := sub[i*aes.BlockSize:][:aes.BlockSize]
		m[1], m[2] = byte(i+1), 'X'
		copy(m[4:], half)
		subtle.XORBytes(m, m, k.mask[:])
		k.block.Encrypt(m, m)
	}
	block, _ := aes.NewCipher(sub[:])
	aead, _ := cipher.NewGCM(block) // fails for blocks of other ciphers alone
	return aead
}

// Seal appends a block, sealed, to dst. plain may begin where dst ends, and not overlap otherwise.
// Where dst has room for len(plain)+Overhead bytes more it does not allocate.
func (k *Keys) Seal(dst, plain, about []byte) []byte {
	n, at := len(plain), len(dst)
	dst = slices.Grow(dst, n+Overhead)[:at+n+Overhead]
	nonce := dst[at+n+tagBytes:][:nonceBytes]
	copy(nonce, k.half[:])
	binary.BigEndian.PutUint32(nonce[halfNonce:], 0)
	binary.BigEndian.PutUint64(nonce[halfNonce+4:], k.sealed.Add(1))
	copy(dst[at+n+tagBytes+nonceBytes:], k.keys[0].id[:])
	k.sealer.Seal(dst[:at], nonce[halfNonce:], plain, about)
	return dst
}

// Open appends the block that was sealed to dst. sealed may begin where dst ends, and not overlap
// otherwise. The error is driver.ErrCorrupt: no key of the file has sealed it, or not these bytes,
// or not about that. It does not allocate where dst has room, but for the first block that a
// process has sealed.
func (k *Keys) Open(dst, sealed, about []byte) ([]byte, error) {
	n := len(sealed) - Overhead
	if n < 0 {
		return nil, fmt.Errorf("%d bytes are no sealed block: %w", len(sealed), driver.ErrCorrupt)
	}
	nonce, id := sealed[n+tagBytes:][:nonceBytes], sealed[n+tagBytes+nonceBytes:]
	aead := k.of(id, nonce[:halfNonce])
	if aead == nil {
		return nil, fmt.Errorf("a block was sealed by key %x, which is not in %s: %w", id, k.path,
			driver.ErrCorrupt)
	}
	plain, err := aead.Open(dst, nonce[halfNonce:], sealed[:n+tagBytes], about)
	if err != nil {
		return nil, fmt.Errorf("a sealed block was changed, or is not what it is taken for: %w",
			driver.ErrCorrupt)
	}
	return plain, nil
}

// of returns the cipher of a key and the first half of a nonce; nil: there is no such key.
func (k *Keys) of(id, half []byte) cipher.AEAD {
	var name [idBytes + halfNonce]byte
	copy(name[copy(name[:], id):], half)
	k.mu.RLock()
	aead := k.derived[name]
	k.mu.RUnlock()
	if aead != nil {
		return aead
	}
	at := slices.IndexFunc(k.keys, func(o key) bool { return bytes.Equal(o.id[:], id) })
	if at < 0 {
		return nil
	}
	aead = k.keys[at].derive(half)
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.derived) == derivedMax { // what lies there may be anybody's
		clear(k.derived)
	}
	k.derived[name] = aead
	return aead
}
