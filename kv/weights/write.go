// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/sluicehq/sluice/engine"
)

// Write writes one file with these tensors, in this order. It calls data for the bytes of each, in
// the same order. Of a Tensor it uses name, type and shape.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string, data func(Tensor) (io.Reader,
	error)) error {
	head, sized, err := head(tensors, metadata)
	if err != nil {
		return err
	}
	if _, err := w.Write(head); err != nil {
		return fmt.Errorf("write weights: %w", err)
	}
	for _, t := range sized {
		from, err := data(t)
		if err != nil {
			return fmt.Errorf("write weights: tensor %q: %w", t.Name, err)
		}
		if _, err := io.CopyN(w, from, t.Len); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("write weights: tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

// head returns the header with its length, padded so that the data begins at a multiple of eight
// bytes.
func head(tensors []Tensor, metadata map[string]string) (b []byte, sized []Tensor, err error) {
	var text bytes.Buffer
	text.Write(make([]byte, prefix))
	text.WriteByte('{')
	separate := func() {
		if text.Len() > prefix+1 {
			text.WriteByte(',')
		}
	}
	if len(metadata) > 0 {
		text.WriteString(`"__metadata__":`)
		object := []byte{'{'}
		for _, key := range slices.Sorted(maps.Keys(metadata)) {
			object = append(append(append(append(object, quote(key)...), ':'),
				quote(metadata[key])...), ',')
		}
		object[len(object)-1] = '}'
		text.Write(object)
	}
	seen, end := map[string]bool{"__metadata__": true}, uint64(0)
	for _, t := range tensors {
		size, ok := t.Type.size(t.Shape)
		if !ok || t.Type.Bits() == 0 || len(t.Shape) > dimsMax || seen[t.Name] {
			return nil, nil, fmt.Errorf("write weights: tensor %q, %s of shape %v, is there "+
				"twice or cannot be: %w", t.Name, t.Type, t.Shape, engine.ErrBounds)
		}
		seen[t.Name] = true
		separate()
		shape := append([]uint64{}, t.Shape...)
		list, _ := json.Marshal(shape) // of numbers: it cannot fail
		fmt.Fprintf(&text, `%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, quote(t.Name),
			t.Type, list, end, end+size)
		t.Len, end = int64(size), end+size
		sized = append(sized, t)
	}
	text.WriteByte('}')
	for text.Len()%8 != 0 {
		text.WriteByte(' ')
	}
	b = text.Bytes()
	if n := len(b) - prefix; n > HeaderMax {
		return nil, nil, fmt.Errorf("write weights: the header has %d bytes, of at most %d: "+
			"spread the tensors over several files: %w", n, HeaderMax, engine.ErrBounds)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-prefix))
	return b, sized, nil
}

func quote(s string) []byte {
	b, _ := json.Marshal(s) // a string: it cannot fail
	return b
}
