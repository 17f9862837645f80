// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func sample(regions int) *Description {
	d := &Description{
		Engine: ID{1, 2, 3}, Host: ID{9}, Name: "decode-0",
		Backends: []Backend{{"mem", []byte("m")}, {"shm", []byte("some address")}},
	}
	for i := range regions {
		secret := crc32.ChecksumIEEE([]byte{byte(i), byte(i >> 8)})
		token := binary.LittleEndian.AppendUint32(nil, secret)
		token = append(bytes.Repeat(token, 4), byte(i), byte(i>>8), 1)
		r := Region{Name: fmt.Sprintf("kv.layer.%04d", i), Size: 1 << 20}
		tokens := [][]byte{token, append(bytes.Clone(token[:18]), 7, 7)}
		if i%3 == 1 {
			r.ReadOnly, r.Kind, tokens[0] = true, driver.File, nil
		}
		r.Pack(tokens)
		d.Regions = append(d.Regions, r)
	}
	return d
}

func TestRoundTrip(t *testing.T) {
	for _, n := range []int{0, 1, 2, 100} {
		want := sample(n)
		b, err := Encode([]byte("before"), want)
		require.NoError(t, err)
		got, err := Decode(b[len("before"):])
		require.NoError(t, err)
		if !got.Equal(want) || len(got.Regions) != n || got.Name != want.Name {
			t.Errorf("%d regions came back otherwise: %+v", n, got)
		}
		for i := range got.Regions {
			for j := range want.Backends {
				token, want := got.Regions[i].Token(j), want.Regions[i].Token(j)
				if !bytes.Equal(token, want) || (token == nil) != (want == nil) {
					t.Errorf("region %d token %d: %x, want %x", i, j, token, want)
				}
			}
		}
	}
}

func TestCutAndFlipped(t *testing.T) {
	b, err := Encode(nil, sample(5))
	require.NoError(t, err)
	for n := range b {
		if _, err := Decode(b[:n]); !errors.Is(err, driver.ErrCorrupt) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
	for bit := range len(b) * 8 {
		bad := bytes.Clone(b)
		bad[bit/8] ^= 1 << (bit % 8)
		if _, err := Decode(bad); !errors.Is(err, driver.ErrCorrupt) &&
			!errors.Is(err, driver.ErrVersion) {
			t.Fatalf("bit %d flipped: %v", bit, err)
		}
	}
	if _, err := Decode(append(bytes.Clone(b), 0)); err == nil {
		t.Error("a byte too many was accepted")
	}
}

func TestOtherVersion(t *testing.T) {
	b, _ := Encode(nil, sample(1))
	b[len(magic)]++
	if _, err := Decode(b); !errors.Is(err, driver.ErrVersion) {
		t.Errorf("got %v, want ErrVersion", err)
	}
}

func TestEncodeRefusesWhatDecodeWould(t *testing.T) {
	long := string(bytes.Repeat([]byte("n"), NameMax+1))
	for name, change := range map[string]func(*Description){
		"name":    func(d *Description) { d.Name = long },
		"region":  func(d *Description) { d.Regions[0].Name = long },
		"size":    func(d *Description) { d.Regions[0].Size = 0 },
		"address": func(d *Description) { d.Backends[0].Addr = make([]byte, driver.AddrMax+1) },
		"token": func(d *Description) {
			d.Regions[0].Tokens[1] = make([]byte, driver.TokenMax+1)
		},
	} {
		d := sample(1)
		change(d)
		if _, err := Encode(nil, d); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// FuzzDecode has one property: what is accepted encodes to the same bytes. The
// checksum is mended first, so that the fuzzer gets past it.
func FuzzDecode(f *testing.F) {
	for _, n := range []int{0, 1, 7} {
		b, _ := Encode(nil, sample(n))
		f.Add(b[:len(b)-checksumLen])
	}
	for _, ranges := range []driver.Ranges{{{Off: 0, Len: 1}}, blocks(3)} {
		b, _ := Encode(nil, lease(ranges))
		f.Add(b[:len(b)-checksumLen])
	}
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := Decode(b); err == nil {
			return
		}
		sealed := seal(bytes.Clone(b), 0)
		d, err := Decode(sealed)
		if err != nil {
			if d != nil {
				t.Fatal("both a value and an error")
			}
			return
		}
		again, err := Encode(nil, d)
		require.NoError(t, err, "accepted but cannot be encoded")
		ranged := func(r Region) bool { return r.Only != nil } // has other encodings, too
		if slices.ContainsFunc(d.Regions, ranged) {
			if same, err := Decode(again); err != nil || !same.Equal(d) {
				t.Fatalf("another description than was encoded: %v", err)
			}
			return
		}
		if !bytes.Equal(again, sealed) {
			t.Fatalf("two encodings of one description:\n%x\n%x", sealed, again)
		}
	})
}

// TestDecodeDoesNotSwell reads regions of a few bytes that each repeat the long
// name and the long tokens of the one before: a stranger may not make us hold
// many times what it sent.
func TestDecodeDoesNotSwell(t *testing.T) {
	d := Description{Name: "n"}
	tokens := make([][]byte, BackendsMax)
	for i := range tokens {
		d.Backends = append(d.Backends,
			Backend{Name: string(rune('a'+i%26)) + string(rune('a'+i/26)), Addr: []byte{1}})
		tokens[i] = bytes.Repeat([]byte{7}, driver.TokenMax)
	}
	for range 2000 {
		r := Region{Name: strings.Repeat("r", NameMax), Size: 1}
		r.Pack(slices.Clone(tokens))
		d.Regions = append(d.Regions, r)
	}
	b, err := Encode(nil, &d)
	require.NoError(t, err)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err = Decode(b)
	runtime.ReadMemStats(&after)
	require.ErrorIs(t, err, driver.ErrCorrupt)
	if grown, most := after.TotalAlloc-before.TotalAlloc, uint64(64*len(b)); grown > most {
		t.Errorf("%d bytes were taken for %d, want at most %d", grown, len(b), most)
	}
}

// TestDecodeOfSparseTokens reads many regions whose one token is that of the last backend: a
// description is held in a few times its own bytes.
func TestDecodeOfSparseTokens(t *testing.T) {
	d := &Description{Name: "x"}
	for i := range BackendsMax {
		d.Backends = append(d.Backends, Backend{Name: string(rune('A' + i))})
	}
	for range 1 << 17 {
		d.Regions = append(d.Regions, Region{Name: "r", Size: 1, Set: 1 << (BackendsMax - 1),
			Tokens: [][]byte{{1}}})
	}
	b, err := Encode(nil, d)
	require.NoError(t, err)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	got, err := Decode(b)
	require.NoError(t, err)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if held, most := after.HeapAlloc-before.HeapAlloc, uint64(20*len(b)); held > most {
		t.Errorf("%d bytes are held for %d, want at most %d", held, len(b), most)
	}
	runtime.KeepAlive(got)
}
