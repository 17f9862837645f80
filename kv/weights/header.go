// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// HeaderMax bounds the header of a file in bytes: what other readers of safetensors accept.
	HeaderMax = 100_000_000
	dimsMax   = 64  // dimensions of a tensor; no framework supports more
	depthMax  = 120 // nesting depth of JSON values to skip
	prefix    = 8   // bytes of the header's length before the header
)

// Source is one file. Several goroutines use its ReaderAt at once.
type Source struct {
	Name string // in errors
	io.ReaderAt
	Size int64 // bytes
}

// Tensor is one tensor of a file.
type Tensor struct {
	Name  string
	Type  DType
	Shape []uint64 // empty: a single element
	Len   int64    // bytes

	file   int   // of the Model
	offset int64 // in the file
}

// header is the decoded header of a file.
type header struct {
	Tensors  []Tensor // in the order of their bytes
	Metadata map[string]string
}

// readHeader reads and checks the header of a file.
func readHeader(src Source) (h header, err error) {
	var length [prefix]byte
	if src.Size < prefix {
		return h, cmp.Or(otherKind(src), faulty(src.Name, "", "%d bytes are too few for a "+
			"safetensors file: it is cut", src.Size))
	}
	if err := readFull(src, length[:], 0); err != nil {
		return h, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	switch {
	case n > HeaderMax:
		return h, cmp.Or(otherKind(src), faulty(src.Name, "", "the header would have %d "+
			"bytes, of at most %d: is this a safetensors file?", n, HeaderMax))
	case int64(n) > src.Size-prefix:
		return h, cmp.Or(otherKind(src), faulty(src.Name, "", "the header has %d bytes, the "+
			"file ends %d bytes before its end: it is cut, download it again", n,
			int64(n)-(src.Size-prefix)))
	}
	text := make([]byte, n)
	if err := readFull(src, text, prefix); err != nil {
		return h, err
	}
	if h, err = parse(src.Name, text); err != nil {
		return h, err
	}
	return h, h.place(src, prefix+int64(n))
}

// readFull reads all of b.
func readFull(src Source, b []byte, at int64) error {
	n, err := src.ReadAt(b, at)
	switch {
	case n == len(b): // then io.EOF is no error
		return nil
	case err == nil || errors.Is(err, io.EOF):
		return faulty(src.Name, "", "it ends at %d, its size was said to be %d", at+int64(n),
			src.Size)
	}
	return &FileError{File: src.Name, Err: fmt.Errorf("read at %d: %w", at, err)}
}

// place sorts the tensors by offset and checks that each byte of the file belongs to exactly one:
// there are no overlaps, gaps or missing bytes. Before the call, offsets count from the end of the
// header; afterwards, from the start of the file.
func (h *header) place(src Source, data int64) error {
	slices.SortStableFunc(h.Tensors, func(a, b Tensor) int {
		switch {
		case a.offset != b.offset:
			return sign(a.offset - b.offset)
		case a.Len != b.Len:
			return sign(a.Len - b.Len) // empty ones first
		}
		return strings.Compare(a.Name, b.Name)
	})
	end := int64(0)
	for i := range h.Tensors {
		t := &h.Tensors[i]
		switch {
		case t.offset < end:
			return faulty(src.Name, t.Name, "it begins at byte %d of the data, within the one "+
				"before, which ends at %d", t.offset, end)
		case t.offset > end:
			return faulty(src.Name, t.Name, "it begins at byte %d of the data, after a hole "+
				"of %d bytes", t.offset, t.offset-end)
		case t.Len > src.Size-data-end:
			return faulty(src.Name, t.Name, "it ends %d bytes after the end of the file: the "+
				"file is cut, download it again", t.Len-(src.Size-data-end))
		}
		end += t.Len
		t.offset += data
	}
	if rest := src.Size - data - end; rest > 0 {
		return faulty(src.Name, "", "%d bytes after the last tensor belong to none", rest)
	}
	return nil
}

func sign(n int64) int {
	if n < 0 {
		return -1
	}
	return 1
}

// parser reads the JSON of a header in one pass and without recursion.
type parser struct {
	*json.Decoder
	file, tensor string
}

// parse accepts what the safetensors library accepts: of a name that appears twice it uses the last
// entry, and it ignores unknown keys of a tensor.
func parse(file string, text []byte) (h header, err error) {
	if !utf8.Valid(text) {
		return h, faulty(file, "", "the header is not a JSON object in UTF-8")
	}
	p := parser{Decoder: json.NewDecoder(bytes.NewReader(text)), file: file}
	p.UseNumber()
	at := map[string]int{} // in h.Tensors
	err = p.object(func(name string) error {
		if name == "__metadata__" {
			return p.metadata(&h)
		}
		p.tensor = name
		t, err := p.entry(name)
		if i, twice := at[name]; twice {
			h.Tensors[i] = t
		} else {
			at[name] = len(h.Tensors)
			h.Tensors = append(h.Tensors, t)
		}
		p.tensor = ""
		return err
	})
	if err != nil {
		return header{}, err
	}
	if _, err := p.Token(); !errors.Is(err, io.EOF) {
		return header{}, p.fault("something follows the header's object")
	}
	for i := range h.Tensors {
		t := &h.Tensors[i]
		p.tensor = t.Name
		if err := p.check(t); err != nil {
			return header{}, err
		}
	}
	if h.Metadata == nil {
		h.Metadata = map[string]string{}
	}
	return h, nil
}

// metadata parses __metadata__, a map of strings; null means none.
func (p *parser) metadata(h *header) error {
	if h.Metadata != nil {
		return p.fault(`"__metadata__" is there twice`)
	}
	h.Metadata = map[string]string{}
	t, err := p.token()
	if err != nil || t == nil {
		return err
	}
	return p.members(t, func(key string) error {
		value, err := p.text()
		h.Metadata[key] = value
		return err
	})
}

func (p *parser) fault(format string, args ...any) error {
	return faulty(p.file, p.tensor, "header: "+format, args...)
}

func (p *parser) token() (json.Token, error) {
	t, err := p.Token()
	if err != nil {
		return nil, p.fault("at byte %d: %v", p.InputOffset(), err)
	}
	return t, nil
}

// delim parses one bracket.
func (p *parser) delim(want json.Delim) error {
	t, err := p.token()
	if err == nil && t != want {
		err = p.fault("at byte %d: %v where %v should be", p.InputOffset(), t, want)
	}
	return err
}

// object parses an object and calls value for each name.
func (p *parser) object(value func(name string) error) error {
	t, err := p.token()
	if err != nil {
		return err
	}
	return p.members(t, value)
}

// members parses an object whose first token was already read.
func (p *parser) members(first json.Token, value func(name string) error) error {
	if first != json.Delim('{') {
		return p.fault("at byte %d: %v where { should be", p.InputOffset(), first)
	}
	for p.More() {
		name, err := p.text()
		if err != nil {
			return err
		}
		if err := value(name); err != nil {
			return err
		}
	}
	return p.delim('}')
}

// skip parses and discards any value, up to the depth that the safetensors library allows.
func (p *parser) skip() error {
	for depth := 0; ; {
		t, err := p.token()
		if err != nil {
			return err
		}
		switch t := t.(type) {
		case json.Delim:
			if t == '{' || t == '[' {
				depth++
			} else {
				depth--
			}
		case json.Number:
			if _, err := t.Float64(); err != nil {
				return p.fault("at byte %d: %v", p.InputOffset(), err)
			}
		}
		if depth > depthMax {
			return p.fault("at byte %d: more than %d brackets within each other", p.InputOffset(),
				depthMax)
		}
		if depth == 0 {
			return nil
		}
	}
}

func (p *parser) text() (string, error) {
	t, err := p.token()
	if err != nil {
		return "", err
	}
	s, ok := t.(string)
	if !ok {
		return "", p.fault("at byte %d: %v where a string should be", p.InputOffset(), t)
	}
	return s, nil
}

// numbers parses a list of whole numbers.
func (p *parser) numbers(most int) (list []uint64, err error) {
	if err := p.delim('['); err != nil {
		return nil, err
	}
	list = []uint64{}
	for p.More() {
		t, err := p.token()
		if err != nil {
			return nil, err
		}
		text, ok := t.(json.Number)
		n, err := strconv.ParseUint(string(text), 10, 64)
		if !ok || err != nil || len(list) == most {
			return nil, p.fault("at byte %d: not a list of at most %d whole numbers below 2^64",
				p.InputOffset(), most)
		}
		list = append(list, n)
	}
	return list, p.delim(']')
}

// entry parses the description of one tensor. Until check runs, offset and Len hold where the
// tensor begins and ends.
func (p *parser) entry(name string) (t Tensor, err error) {
	t.Name = name
	var offsets []uint64
	seen := map[string]bool{}
	err = p.object(func(key string) (err error) {
		if seen[key] {
			return p.fault("%.200q is there twice", key)
		}
		switch key {
		case "dtype":
			var text string
			text, err = p.text()
			t.Type = DType(text)
		case "shape":
			t.Shape, err = p.numbers(dimsMax)
		case "data_offsets":
			offsets, err = p.numbers(2)
		default:
			return p.skip()
		}
		seen[key] = true
		return err
	})
	if err != nil {
		return t, err
	}
	for _, key := range []string{"dtype", "shape", "data_offsets"} {
		if !seen[key] {
			return t, p.fault("no %s", key)
		}
	}
	if t.Type.Bits() == 0 {
		return t, p.fault("dtype %.40q is not known", t.Type)
	}
	if len(offsets) != 2 {
		return t, p.fault("data_offsets %v are no range", offsets)
	}
	t.offset, t.Len = int64(min(offsets[0], math.MaxInt64)), int64(min(offsets[1], math.MaxInt64))
	return t, nil
}

// check replaces Len, so far the end, by the length, and compares that with type and shape.
func (p *parser) check(t *Tensor) error {
	if t.offset > t.Len || t.Len == math.MaxInt64 {
		return p.fault("data_offsets [%d %d] are no range", t.offset, t.Len)
	}
	t.Len -= t.offset
	size, ok := t.Type.size(t.Shape)
	if !ok {
		return p.fault("%s of shape %v has no whole number of bytes that can be", t.Type, t.Shape)
	}
	if size != uint64(t.Len) {
		return p.fault("%d bytes where %s of shape %v has %d", t.Len, t.Type, t.Shape, size)
	}
	return nil
}
