// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// file makes one of a header and as many bytes of data.
func file(header string, data int) Source {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(append(b, header...), make([]byte, data)...)
	return source("made.safetensors", b)
}

func source(name string, b []byte) Source {
	return Source{Name: name, ReaderAt: bytes.NewReader(b), Size: int64(len(b))}
}

func entry(name, dtype, shape, offsets string) string {
	return fmt.Sprintf(`"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%s]}`, name, dtype, shape,
		offsets)
}

func TestHeader(t *testing.T) {
	h, err := readHeader(file(`{"__metadata__":{"format":"pt","":""},`+entry("b", "F32", "2, 3",
		"8,32")+`,`+
		`"a":{"data_offsets":[0,8],"shape":[],"dtype":"I64"},`+entry("none", "BF16", "4,0", "8,8")+
		`,`+entry("half", "F4", "3,2", "32,35")+"}   ", 35))
	require.NoError(t, err)
	var got []string
	for _, x := range h.Tensors {
		got = append(got, fmt.Sprintf("%s %s %v %d", x.Name, x.Type, x.Shape, x.Len))
	}
	if want := []string{"a I64 [] 8", "none BF16 [4 0] 0", "b F32 [2 3] 24",
		"half F4 [3 2] 3"}; !slices.Equal(got, want) {
		t.Errorf("tensors %q, want %q", got, want)
	}
	if len(h.Metadata) != 2 || h.Metadata["format"] != "pt" {
		t.Errorf("metadata %v", h.Metadata)
	}
	if h, err := readHeader(file("{}", 0)); err != nil || len(h.Tensors) != 0 {
		t.Errorf("a file without tensors: %+v, %v", h, err)
	}
}

var spoilt = []struct {
	name, header string
	data         int
	tensor, want string
}{
	{"not JSON", "hello", 0, "", "header: at byte"},
	{"empty header", "", 0, "", "header: at byte"},
	{"a list", "[]", 0, "", "where { should be"},
	{"bad UTF-8", "{\"\xff\":1}", 0, "", "not a JSON object"},
	{"cut JSON", `{"a":{"dtype":"F32"`, 0, "a", "header: at byte"},
	{"two objects", "{}{}", 0, "", "something follows"},
	{"unknown type", "{" + entry("a", "F23", "1", "0,4") + "}", 4, "a", `dtype "F23" is not known`},
	{"type is a number", `{"a":{"dtype":4,"shape":[1],"data_offsets":[0,4]}}`, 4, "a",
		"where a string should be"},
	{"no shape", `{"a":{"dtype":"F32","data_offsets":[0,4]}}`, 4, "a", "no shape"},
	{"key twice", `{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 4, "a",
		`"dtype" is there twice`},
	{"tensor twice", "{" + entry("a", "F32", "1", "0,4") + "," + entry("a", "F32", "1", "4,8") +
		"}", 8, "a", "after a hole of 4 bytes"}, // the last one counts
	{"metadata twice", `{"__metadata__":{},"__metadata__":{}}`, 0, "", "is there twice"},
	{"metadata of numbers", `{"__metadata__":{"a":1}}`, 0, "", "where a string should be"},
	{"overlap", "{" + entry("a", "F32", "1", "0,4") + "," + entry("b", "F32", "1", "2,6") + "}", 6,
		"b", "within the one before"},
	{"hole", "{" + entry("a", "F32", "1", "0,4") + "," + entry("b", "F32", "1", "8,12") + "}", 12,
		"b", "after a hole of 4 bytes"},
	{"hole in front", "{" + entry("a", "F32", "1", "4,8") + "}", 8, "a", "after a hole of 4 bytes"},
	{"bytes behind", "{" + entry("a", "F32", "1", "0,4") + "}", 5, "",
		"1 bytes after the last tensor"},
	{"cut file", "{" + entry("a", "F32", "2", "0,8") + "}", 5, "a", "3 bytes after the end " +
		"of the file"},
	{"offsets past all bounds", "{" + entry("a", "U8", "1152921504606846976",
		"0,1152921504606846976") + "}", 5, "a", "after the end of the file"},
	{"offset that is no number", "{" + entry("a", "F32", "1", "0,-4") + "}", 4, "a",
		"whole numbers"},
	{"offset with a fraction", "{" + entry("a", "F32", "1", "0,4.0") + "}", 4, "a",
		"whole numbers"},
	{"offset of 2^63", "{" + entry("a", "F32", "1", "0,9223372036854775808") + "}", 4, "a",
		"no range"},
	{"three offsets", "{" + entry("a", "F32", "1", "0,4,8") + "}", 8, "a", "at most 2"},
	{"one offset", "{" + entry("a", "F32", "1", "4") + "}", 4, "a", "no range"},
	{"offsets turned round", "{" + entry("a", "F32", "1", "4,0") + "}", 4, "a", "no range"},
	{"another size", "{" + entry("a", "F32", "3", "0,8") + "}", 8, "a",
		"8 bytes where F32 of shape [3] has 12"},
	{"size past all bounds", "{" + entry("a", "F32", "4294967296,4294967296,4294967296", "0,8") +
		"}", 8, "a", "no whole number of bytes"},
	{"half a byte", "{" + entry("a", "F4", "3", "0,1") + "}", 1, "a", "no whole number of bytes"},
	{"too many dimensions", "{" + entry("a", "U8", strings.Repeat("1,", 64)+"1", "0,1") + "}", 1,
		"a", "at most 64"},
}

func TestSpoiltHeaders(t *testing.T) {
	for _, c := range spoilt {
		_, err := readHeader(file(c.header, c.data))
		var fault *FileError
		if !errors.As(err, &fault) || fault.File != "made.safetensors" ||
			fault.Tensor != c.tensor || !errors.Is(err, engine.ErrCorrupt) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want tensor %q and %q", c.name, err, c.tensor, c.want)
		}
	}
}

// TestNoSafetensorsFile names what people take for one.
func TestNoSafetensorsFile(t *testing.T) {
	pointer := "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
	for _, c := range [][2]string{
		{"", "it is empty"},
		{pointer, "pointer of Git LFS"},
		{`{"metadata":{},"weight_map":{}}`, "it is JSON"},
		{"\n  {\n \"a\": 1}", "it is JSON"},
		{"PK\x03\x04\x14\x00\x00\x08\x08\x00", "pickle"},
		{"\x80\x02}q\x00(X\x05\x00\x00\x00", "pickle"},
		{"\x80\x04\x95\x10\x00\x00\x00\x00\x00", "pickle"},
		{"GGUF\x03\x00\x00\x00\x00", "GGUF"},
		{"<!DOCTYPE html><html>", "web page"},
		{"\x10\x00\x00\x00", "too few for a safetensors file: it is cut"},
		{"\x10\x00\x00\x00\x00\x00\x00\x00{}", "it is cut, download it again"},
		{"something else", "is this a safetensors file?"},
	} {
		text, want := c[0], c[1]
		_, err := readHeader(source("named", []byte(text)))
		if !errors.Is(err, engine.ErrCorrupt) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestHeaderLength(t *testing.T) {
	for name, c := range map[string]struct {
		length uint64
		have   int
		want   string
	}{
		"no file at all": {0, -8, "it is empty"}, "cut prefix": {0, -3, "too few"},
		"beyond the bound": {HeaderMax + 1, 100, "of at most"},
		"all ones":         {1<<64 - 1, 100, "of at most"}, "beyond the end": {101, 100,
			"ends 1 bytes before"}, "a large one, cut": {HeaderMax, 100, "before its end"},
	} {
		b := append(binary.LittleEndian.AppendUint64(nil, c.length),
			make([]byte, max(c.have, 0))...)
		_, err := readHeader(source("made.safetensors", b[:8+c.have]))
		if !errors.Is(err, engine.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	short := file("{}", 0)
	short.Size += 100
	if _, err := readHeader(Source{short.Name, bytes.NewReader(nil), 100}); !errors.Is(err,
		engine.ErrCorrupt) || !strings.Contains(err.Error(), "was said to be 100") {
		t.Errorf("a file that is shorter than was said: %v", err)
	}
	broken := errors.New("the disk is broken")
	var fault *FileError
	if _, err := readHeader(Source{"a", failing{broken}, 100}); !errors.Is(err, broken) ||
		errors.Is(err, engine.ErrCorrupt) || !errors.As(err, &fault) {
		t.Errorf("a read that fails: %v", err)
	}
}

type failing struct{ err error }

func (f failing) ReadAt([]byte, int64) (int, error) { return 0, f.err }

// TestLongNames cuts names in errors.
func TestLongNames(t *testing.T) {
	_, err := readHeader(file("{"+entry(strings.Repeat("x", 1<<16), "F23", "1", "0,4")+"}", 4))
	if err == nil || len(err.Error()) > 1000 {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
}

// FuzzHeader wants that whatever is accepted covers the data once, and can be written again.
func FuzzHeader(f *testing.F) {
	for _, c := range spoilt {
		f.Add(c.header, uint16(c.data))
	}
	f.Add(`{"__metadata__":{"a":"b"},`+entry("a", "F32", "1", "0,4")+`,`+entry("b", "F4", "2",
		"4,5")+`,`+entry("", "U8", "0", "5,5")+`}`, uint16(5))
	f.Fuzz(func(t *testing.T, header string, data uint16) {
		src := file(header, int(data))
		h, err := readHeader(src)
		if err != nil {
			var fault *FileError
			if !errors.As(err, &fault) || !errors.Is(err, engine.ErrCorrupt) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		end := src.Size - int64(data)
		for _, x := range h.Tensors {
			if x.offset != end || x.Len < 0 {
				t.Fatalf("%+v, want it to begin at %d", x, end)
			}
			end += x.Len
		}
		if end != src.Size {
			t.Fatalf("the tensors end at %d of %d", end, src.Size)
		}
		var out bytes.Buffer
		require.NoError(t, Write(&out, h.Tensors, h.Metadata, func(x Tensor) (io.Reader, error) {
			return io.NewSectionReader(src, x.offset, x.Len), nil
		}))
		again, err := readHeader(source("again", out.Bytes()))
		if err != nil || len(again.Tensors) != len(h.Tensors) ||
			fmt.Sprint(again.Metadata) != fmt.Sprint(h.Metadata) {
			t.Fatalf("written again: %+v, %v, was %+v", again, err, h)
		}
	})
}
