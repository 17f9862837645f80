// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package csrc

func beforeCuFile() error { return cufileUnavailable(cudaNoCgo, cudaNoCgoFix) }

func loadCuFile(string, string) (reason, fix string) { return cudaNoCgo, cudaNoCgoFix }

// CuFileEnvironment returns nothing: there is no library to be told.
func CuFileEnvironment() (log, config string) { return "", "" }

// LookAtCuFile answers a *driver.UnavailableError without cgo.
func LookAtCuFile() (CuFileFacts, error) {
	return CuFileFacts{}, cufileUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// CuFileMover is a way to cuFile; there is none without cgo.
type CuFileMover struct{}

// OpenCuFileMover answers a *driver.UnavailableError without cgo.
func OpenCuFileMover(*CUDAEnds, int, int, CuFileWay, int) (*CuFileMover, error) {
	return nil, cufileUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Close is never called: there is no mover.
func (*CuFileMover) Close() {}

// Put is never called.
func (*CuFileMover) Put([]CuFileRequest) {}

// Cancel is never called.
func (*CuFileMover) Cancel(uint32, bool) {}

// Lessened is never called.
func (*CuFileMover) Lessened() uint64 { return 0 }

// Use is never called.
func (*CuFileMover) Use(int) error { return nil }

// Whose is never called.
func (*CuFileMover) Whose(int, uint64, uint64) (device int, until uint64, err error) {
	return 0, 0, cufileUnavailable(cudaNoCgo, cudaNoCgoFix)
}

// Register is never called.
func (*CuFileMover) Register(int, uint64, uint64) error { return nil }

// Deregister is never called.
func (*CuFileMover) Deregister(int, uint64) error { return nil }

// OpenCuFile answers a *driver.UnavailableError without cgo.
func OpenCuFile(int) (uint64, error) { return 0, cufileUnavailable(cudaNoCgo, cudaNoCgoFix) }

// CloseCuFile is never called.
func CloseCuFile(uint64) {}

// CuFileStatus is never called.
func CuFileStatus(string, *Done) error { return cufileUnavailable(cudaNoCgo, cudaNoCgoFix) }

// Pending is never called: there are no ends.
func (*CUDAEnds) Pending() bool { return false }
