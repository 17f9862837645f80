// SPDX-License-Identifier: Apache-2.0

package drivertest

import "github.com/sluicehq/sluice/driver"

// Card is the test's own way to memory of a device, which is not the backend's.
type Card interface {
	Alloc(n uint64) (at uint64, err error)
	Free(at uint64) error
	Read(to []byte, from uint64) error
	Write(to uint64, from []byte) error
}

// HBM makes memory of the device with that number.
func HBM(c Card, ordinal int, n uint64) (*Space, error) {
	at, err := c.Alloc(n)
	if err != nil {
		return nil, err
	}
	s := &Space{
		Segment: driver.Segment{Kind: driver.HBM, Len: n, Addr: at, Device: ordinal},
		Bytes:   CardBytes{c, at, n}, Free: func() error { return c.Free(at) },
	}
	_, err = s.Bytes.WriteAt(make([]byte, n), 0)
	return s, err
}

// CardBytes is Bytes over memory of a device.
type CardBytes struct {
	Card    Card
	At, Len uint64
}

// ReadAt implements io.ReaderAt.
func (b CardBytes) ReadAt(p []byte, off int64) (int, error) {
	return b.move(p, off, func(at uint64) error { return b.Card.Read(p, at) })
}

// WriteAt implements io.WriterAt.
func (b CardBytes) WriteAt(p []byte, off int64) (int, error) {
	return b.move(p, off, func(at uint64) error { return b.Card.Write(at, p) })
}

func (b CardBytes) move(p []byte, off int64, do func(at uint64) error) (int, error) {
	if off < 0 || uint64(off)+uint64(len(p)) > b.Len {
		return 0, errPastEnd
	}
	if len(p) == 0 {
		return 0, nil
	}
	return len(p), do(b.At + uint64(off))
}
