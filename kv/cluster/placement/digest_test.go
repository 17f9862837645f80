// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func exampleDigest() *Digest {
	return &Digest{Node: 1, Generation: 2, Seq: math.MaxUint64, Part: 4, Load: 5,
		Hot:   []Hot{{keyOf(6), 2}, {keyOf(7), 65535}},
		Added: []uint64{0, 1, 500, 1<<hashBits - 1}, Removed: []uint64{1<<hashBits - 2}}
}

func TestDigestRoundTrip(t *testing.T) {
	for _, d := range []*Digest{exampleDigest(), {Added: []uint64{}, Removed: []uint64{}}} {
		got, err := DecodeDigest(d.Append(nil))
		require.NoError(t, err)
		require.Equal(t, d, got)
	}
}

// TestHostileDigests: bytes that are no digest are refused, without an allocation by their counts.
func TestHostileDigests(t *testing.T) {
	good := exampleDigest().Append(nil)
	for n := range good {
		_, err := DecodeDigest(good[:n])
		require.ErrorIs(t, err, ErrDigest, "cut at %d", n)
	}
	changed := func(change func(b []byte) []byte) []byte { return change(bytes.Clone(good)) }
	for what, b := range map[string][]byte{
		"version":     changed(func(b []byte) []byte { b[0] = 2; return b }),
		"longer":      append(bytes.Clone(good), 0),
		"one owner":   changed(func(b []byte) []byte { b[digestHeader+16] = 1; return b }),
		"hot":         changed(func(b []byte) []byte { b[38] = 0xff; return b }),
		"added":       changed(func(b []byte) []byte { b[42] = 0xff; return b }),
		"removed":     changed(func(b []byte) []byte { b[46] = 0xff; return b }),
		"long zero":   (&Digest{}).Append(nil),
		"beyond":      (&Digest{Added: []uint64{1 << hashBits}}).Append(nil),
		"not sorted":  (&Digest{Added: []uint64{5, 5}}).Append(nil),
		"descending":  (&Digest{Removed: []uint64{5, 4}}).Append(nil),
		"no encoding": {},
	} {
		if what == "long zero" { // the number 0 in two bytes
			binary.LittleEndian.PutUint32(b[39:], 1)
			b = append(b, 0x80, 0)
		}
		_, err := DecodeDigest(b)
		require.ErrorIs(t, err, ErrDigest, what)
	}
	many := &Digest{}
	for hash := range uint64(DigestMax + 1) {
		many.Added = append(many.Added, hash)
	}
	_, err := DecodeDigest(many.Append(nil))
	require.ErrorIs(t, err, ErrDigest, "more than a digest may have")
	huge := changed(func(b []byte) []byte {
		binary.LittleEndian.PutUint32(b[39:], DigestMax)
		return b
	})
	require.Less(t, testing.AllocsPerRun(10, func() { _, _ = DecodeDigest(huge) }), 10.0)
	_, err = DecodeDigest(huge)
	require.ErrorIs(t, err, ErrDigest)
}

func FuzzDecodeDigest(f *testing.F) {
	f.Add(exampleDigest().Append(nil))
	f.Add((&Digest{}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := DecodeDigest(b)
		if err != nil {
			require.ErrorIs(t, err, ErrDigest)
			return
		}
		require.Equal(t, b, d.Append(nil), "a second encoding")
		v := NewView(1000)
		if err := v.Apply(d); err == nil {
			entries, _ := v.Entries()
			require.LessOrEqual(t, entries, len(d.Added))
		}
	})
}
