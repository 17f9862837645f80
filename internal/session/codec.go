// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Codec encodes or decodes the fields of messages and addresses, so that one function says how both
// are done. Numbers are little-endian; data of variable length follows its length.
type Codec struct {
	in  *MessageReader // nil: the codec encodes to out
	out []byte
}

// Decodes reports whether the codec decodes.
func (c *Codec) Decodes() bool { return c.in != nil }

// Fail makes DecodeMessage or DecodeAddress fail.
func (c *Codec) Fail() {
	if c.in != nil {
		c.in.Fail()
	}
}

// Raw encodes or decodes all bytes of b.
func (c *Codec) Raw(b []byte) {
	if c.in == nil {
		c.out = append(c.out, b...)
	} else {
		copy(b, c.in.Bytes(len(b)))
	}
}

// Rest encodes b, or decodes all bytes that are left.
func (c *Codec) Rest(b *[]byte) {
	if c.in != nil {
		*b = make([]byte, c.in.Rest())
	}
	c.Raw(*b)
}

// Uint8 encodes or decodes one byte.
func (c *Codec) Uint8(v *uint8) {
	if c.in == nil {
		c.out = append(c.out, *v)
	} else {
		*v = c.in.Uint8()
	}
}

// Uint16 encodes or decodes two bytes.
func (c *Codec) Uint16(v *uint16) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint16(c.out, *v)
	} else {
		*v = c.in.Uint16()
	}
}

// Uint32 encodes or decodes four bytes.
func (c *Codec) Uint32(v *uint32) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint32(c.out, *v)
	} else {
		*v = c.in.Uint32()
	}
}

// Uint64 encodes or decodes eight bytes.
func (c *Codec) Uint64(v *uint64) {
	if c.in == nil {
		c.out = binary.LittleEndian.AppendUint64(c.out, *v)
	} else {
		*v = c.in.Uint64()
	}
}

// Flag encodes or decodes a byte that is 0 or 1.
func (c *Codec) Flag(v *bool) {
	if c.in == nil {
		c.out = append(c.out, FlagByte(*v))
	} else {
		*v = c.in.Flag()
	}
}

// Data encodes or decodes at most 64 KiB, after their length.
func (c *Codec) Data(v *[]byte) {
	n := uint16(len(*v))
	c.Uint16(&n)
	if c.in != nil {
		*v = make([]byte, min(int(n), c.in.Rest()))
		if len(*v) < int(n) {
			c.Fail()
		}
	}
	c.Raw(*v)
}

// CodecList encodes or decodes a list of at most most elements, at most 255, after their number.
func CodecList[T any](c *Codec, v *[]T, most int, each func(*T)) {
	n := uint8(len(*v))
	c.Uint8(&n)
	if c.in != nil && int(n) > most {
		c.Fail()
		return
	}
	if c.in != nil && n > 0 {
		*v = make([]T, n)
	}
	for i := range *v {
		each(&(*v)[i])
	}
}

// Message is a control message: a version, a kind and a body. Fields encodes or decodes the body,
// in the order on the wire.
type Message interface {
	Kind() byte
	Fields(c *Codec)
}

const messageHead = 2 // bytes of version and kind

// AppendMessage appends an encoded message.
func AppendMessage(b []byte, version byte, m Message) []byte {
	c := Codec{out: append(b, version, m.Kind())}
	m.Fields(&c)
	return c.out
}

// DecodeMessage decodes a message of at most most bytes, and refuses a malformed one. It keeps no
// reference to b. kinds returns an empty message of each kind; nil: there is no such kind.
func DecodeMessage(b []byte, version byte, most int, kinds []func() Message) (Message, error) {
	if len(b) < messageHead || len(b) > most {
		return nil, fmt.Errorf("control message of %d bytes: %w", len(b), driver.ErrCorrupt)
	}
	if b[0] != version {
		return nil, fmt.Errorf("control message of version %d, ours is %d: use the same release "+
			"on both sides: %w", b[0], version, driver.ErrVersion)
	}
	var m Message
	r := ReadMessage(b[messageHead:])
	if int(b[1]) < len(kinds) && kinds[b[1]] != nil {
		m = kinds[b[1]]()
		m.Fields(&Codec{in: &r})
	}
	if m == nil || !r.Done() {
		return nil, fmt.Errorf("control message of kind %d, %d bytes: %w", b[1], len(b),
			driver.ErrCorrupt)
	}
	return m, nil
}

// addressCheck is the number of bytes of an address's digest.
const addressCheck = 8

// EncodeAddress encodes the address of a backend: its mark, which is the backend's name and one
// digit for the version of everything that passes between backends; its fields; and a digest, which
// detects truncation and damage, but not forgery. It fails if that exceeds driver.AddrMax; cure
// says what the program can do then.
func EncodeAddress(mark, cure string, fields func(*Codec)) ([]byte, error) {
	c := Codec{out: []byte(mark)}
	fields(&c)
	sum := sha256.Sum256(c.out)
	b := append(c.out, sum[:addressCheck]...)
	if len(b) > driver.AddrMax {
		return nil, fmt.Errorf("address of %d bytes, at most %d: %s: %w", len(b), driver.AddrMax,
			cure, driver.ErrBounds)
	}
	return b, nil
}

// DecodeAddress decodes what EncodeAddress has made of an address with that mark. The fields are
// complete only if it returns nil.
func DecodeAddress(b []byte, mark string, fields func(*Codec)) error {
	name := mark[:len(mark)-1]
	switch {
	case !bytes.HasPrefix(b, []byte(name)) || len(b) < len(mark):
		return fmt.Errorf("%d bytes that are no %s address: %w", len(b), name, driver.ErrCorrupt)
	case !bytes.HasPrefix(b, []byte(mark)):
		return fmt.Errorf("%s address of version %d, ours is %d: use the same release on both "+
			"sides: %w", name, b[len(name)]-'0', mark[len(name)]-'0', driver.ErrVersion)
	case len(b) < len(mark)+addressCheck || len(b) > driver.AddrMax:
		return fmt.Errorf("%s address of %d bytes: %w", name, len(b), driver.ErrCorrupt)
	}
	body, check := b[:len(b)-addressCheck], b[len(b)-addressCheck:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:addressCheck], check) {
		return fmt.Errorf("%s address is damaged: %w", name, driver.ErrCorrupt)
	}
	r := ReadMessage(body[len(mark):])
	fields(&Codec{in: &r})
	if !r.Done() {
		return fmt.Errorf("%s address: %w", name, driver.ErrCorrupt)
	}
	return nil
}
