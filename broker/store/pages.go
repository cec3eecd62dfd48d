package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
)

// The file format of bbolt, version 2, in the byte order of the machine:
//
//	page     id:u64 | flags:u16 | count:u16 | overflow:u32 | elements | keys and values
//	meta     magic:u32 | version:u32 | page size:u32 | flags:u32 | root:u64 | sequence:u64 |
//	         free list:u64 | pages:u64 | transaction:u64 | FNV-1a of the above:u64
//	branch   element: position:u32 | key size:u32 | page:u64
//	leaf     element: flags:u32 | position:u32 | key size:u32 | value size:u32
//	bucket   value of a leaf with flag 1: root:u64 | sequence:u64 | for root 0: a leaf page
const (
	pageHeader  = 16
	elementSize = 16
	metaSize    = 64
	metaMagic   = 0xED0CDAED

	isBranch   = 0x01
	isLeaf     = 0x02
	isFreeList = 0x10

	leafIsBucket = 0x01
	bucketHeader = 16
	noFreeList   = ^uint64(0)
	longCount    = 0xFFFF // of a free list: the count is its first element
	maxTreeDepth = 64
)

var errPages = errors.New("the file is inconsistent")

// A pageCheck walks a database file page by page. The library maps the file and
// follows whatever numbers stand in it; here each is compared with the file's
// size first, no page is visited twice, and nothing is larger than the file.
type pageCheck struct {
	r    io.ReaderAt
	size uint64 // of a page
	high uint64 // the number of pages
	seen []bool
}

// checkPages says whether the file of length bytes holds together.
func checkPages(r io.ReaderAt, pageSize, length int64) error {
	if pageSize < 512 || length < 2*pageSize {
		return fmt.Errorf("%w: %d bytes are too short", errPages, length)
	}
	meta, err := currentMeta(r, pageSize)
	if err != nil {
		return err
	}
	word := func(at int) uint64 { return binary.NativeEndian.Uint64(meta[at:]) }
	root, free, high := word(16), word(32), word(40)
	if high > uint64(length/pageSize) {
		return fmt.Errorf("%w: it ends after %d of %d pages", errPages, length/pageSize, high)
	}
	c := &pageCheck{r: r, size: uint64(pageSize), high: high, seen: make([]bool, high)}
	if err := c.tree(root, nil, nil, 0); err != nil {
		return err
	}
	if free == noFreeList {
		return nil
	}
	return c.freeList(free)
}

// currentMeta is the newer of the two that are whole.
func currentMeta(r io.ReaderAt, pageSize int64) ([]byte, error) {
	var best []byte
	for i := range int64(2) {
		m := make([]byte, metaSize)
		if _, err := r.ReadAt(m, i*pageSize+pageHeader); err != nil {
			return nil, err
		}
		sum := fnv.New64a()
		_, _ = sum.Write(m[:metaSize-8])
		whole := binary.NativeEndian.Uint32(m) == metaMagic && binary.NativeEndian.Uint64(m[metaSize-8:]) == sum.Sum64()
		if whole && (best == nil || binary.NativeEndian.Uint64(m[48:]) > binary.NativeEndian.Uint64(best[48:])) {
			best = m
		}
	}
	if best == nil {
		return nil, fmt.Errorf("%w: both heads are damaged", errPages)
	}
	return best, nil
}

// take reads a page of one of the kinds with its overflow, once.
func (c *pageCheck) take(id uint64, kinds uint16) (page []byte, kind uint16, err error) {
	bad := func(why string) ([]byte, uint16, error) {
		return nil, 0, fmt.Errorf("%w: page %d %s", errPages, id, why)
	}
	if id < 2 || id >= c.high {
		return bad("is not in the file")
	}
	var head [pageHeader]byte
	if _, err := c.r.ReadAt(head[:], int64(id*c.size)); err != nil {
		return nil, 0, err
	}
	kind = binary.NativeEndian.Uint16(head[8:])
	more := uint64(binary.NativeEndian.Uint32(head[12:]))
	switch {
	case binary.NativeEndian.Uint64(head[:]) != id:
		return bad("is another page")
	case kind&kinds == 0 || kind&(kind-1) != 0:
		return bad(fmt.Sprintf("is of kind %#x", kind))
	case more >= c.high-id:
		return bad("reaches beyond the file")
	}
	for i := id; i <= id+more; i++ {
		if c.seen[i] {
			return bad("is used twice")
		}
		c.seen[i] = true
	}
	page = make([]byte, (more+1)*c.size)
	_, err = c.r.ReadAt(page, int64(id*c.size))
	return page, kind, err
}

// tree checks a page and all below it. Its keys are at least lo and below hi;
// nil is no bound.
func (c *pageCheck) tree(id uint64, lo, hi []byte, depth int) error {
	page, kind, err := c.take(id, isBranch|isLeaf)
	if err != nil {
		return err
	}
	if depth > maxTreeDepth {
		return fmt.Errorf("%w: page %d is too deep", errPages, id)
	}
	elements, err := elementsOf(page, kind, lo, hi)
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	for i, e := range elements {
		switch {
		case kind == isBranch:
			end := hi
			if i+1 < len(elements) {
				end = elements[i+1].key
			}
			err = c.tree(e.child, e.key, end, depth+1)
		case e.bucket:
			err = c.bucket(e.value, depth+1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

type element struct {
	key, value []byte
	child      uint64 // of a branch
	bucket     bool
}

// elementsOf lists what is on a page.
func elementsOf(page []byte, kind uint16, lo, hi []byte) ([]element, error) {
	count := int(binary.NativeEndian.Uint16(page[10:]))
	first := pageHeader + count*elementSize
	if first > len(page) || count == 0 && kind == isBranch {
		return nil, fmt.Errorf("%w: %d elements", errPages, count)
	}
	elements := make([]element, count)
	for i := range elements {
		at := pageHeader + i*elementSize
		word := func(n int) uint64 { return uint64(binary.NativeEndian.Uint32(page[at+4*n:])) }
		e := &elements[i]
		pos, keyLen, valueLen := word(0), word(1), uint64(0)
		if kind == isLeaf {
			pos, keyLen, valueLen = word(1), word(2), word(3)
			e.bucket = word(0) == leafIsBucket
		} else {
			e.child = binary.NativeEndian.Uint64(page[at+8:])
		}
		start := uint64(at) + pos
		if start < uint64(first) || start+keyLen+valueLen > uint64(len(page)) || kind == isLeaf && word(0) > leafIsBucket {
			return nil, fmt.Errorf("%w: element %d lies outside", errPages, i)
		}
		e.key, e.value = page[start:start+keyLen], page[start+keyLen:start+keyLen+valueLen]
		if bytes.Compare(e.key, lo) < 0 || hi != nil && bytes.Compare(e.key, hi) >= 0 || i > 0 && bytes.Compare(elements[i-1].key, e.key) >= 0 {
			return nil, fmt.Errorf("%w: element %d is out of order", errPages, i)
		}
	}
	return elements, nil
}

func (c *pageCheck) bucket(value []byte, depth int) error {
	if len(value) < bucketHeader {
		return fmt.Errorf("%w: a bucket without a head", errPages)
	}
	if root := binary.NativeEndian.Uint64(value); root != 0 {
		return c.tree(root, nil, nil, depth)
	}
	page := value[bucketHeader:]
	if len(page) < pageHeader || binary.NativeEndian.Uint16(page[8:]) != isLeaf {
		return fmt.Errorf("%w: a small bucket without a page", errPages)
	}
	elements, err := elementsOf(page, isLeaf, nil, nil)
	for _, e := range elements {
		if e.bucket {
			err = fmt.Errorf("%w: a bucket in a small bucket", errPages)
		}
	}
	return err
}

// freeList checks that what is to be overwritten next is used by nothing.
func (c *pageCheck) freeList(id uint64) error {
	page, _, err := c.take(id, isFreeList)
	if err != nil {
		return err
	}
	at, count := pageHeader, uint64(binary.NativeEndian.Uint16(page[10:]))
	if count == longCount {
		count, at = binary.NativeEndian.Uint64(page[pageHeader:]), pageHeader+8
	}
	if count > uint64(len(page)-at)/8 {
		return fmt.Errorf("%w: a list of %d free pages", errPages, count)
	}
	for i := range count {
		free := binary.NativeEndian.Uint64(page[at+8*int(i):])
		if free < 2 || free >= c.high || c.seen[free] {
			return fmt.Errorf("%w: page %d is free and is not", errPages, free)
		}
		c.seen[free] = true
	}
	return nil
}
