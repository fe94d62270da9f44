"""The store of responses as one owner sees it.

All owners have one database. The ids of an owner's responses, conversations and items begin with the owner there
(``owned_id``), so no query for one owner can find what belongs to another, and an id of another owner is one that does
not exist. What was stored without an owner has plain ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from singletree.owners import owned_id
from singletree.server.storage.response_store import Store, StoredConversation, StoredItem, StoredResponse


class OwnedStore(Store):
    """What the owner with the name ``owner`` has in a store, which is closed by itself."""

    def __init__(self, store: Store, owner: str) -> None:
        # Without the fields of a store of its own: a method that is missing here fails, and finds nothing of others.
        self._whole = store
        self._owner = owner

    def _own(self, id: str) -> str:
        return owned_id(self._owner, id)

    def _owned(self, response: StoredResponse) -> StoredResponse:
        previous, conversation = response.previous, response.conversation
        return response._replace(
            id=self._own(response.id),
            previous=None if previous is None else self._own(previous),
            conversation=None if conversation is None else self._own(conversation),
            owner=self._owner,
        )

    async def put(self, response: StoredResponse) -> None:
        await self._whole.put(self._owned(response))

    def put_soon(self, response: StoredResponse) -> None:
        self._whole.put_soon(self._owned(response))

    @property
    def is_settled(self) -> bool:
        return self._whole.is_settled

    async def settled(self) -> None:
        await self._whole.settled()

    async def body(self, id: str) -> bytes | None:
        return await self._whole.body(self._own(id))

    async def history(self, id: str) -> list[bytes] | None:
        return await self._whole.history(self._own(id))

    async def input_items(self, id: str) -> list[bytes] | None:
        return await self._whole.input_items(self._own(id))

    async def item(self, id: str) -> bytes | None:
        return await self._whole.item(self._own(id))

    async def delete(self, id: str) -> bool:
        return await self._whole.delete(self._own(id))

    async def add_conversation(self, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
        owned = replace(conversation, id=self._own(conversation.id))
        await self._whole.add_conversation(owned, self._own_items(items))

    async def conversation(self, id: str) -> StoredConversation | None:
        found = await self._whole.conversation(self._own(id))
        return None if found is None else replace(found, id=id)

    async def set_metadata(self, id: str, metadata: bytes) -> None:
        await self._whole.set_metadata(self._own(id), metadata)

    async def delete_conversation(self, id: str) -> None:
        await self._whole.delete_conversation(self._own(id))

    async def add_items(self, conversation: str, items: Sequence[StoredItem]) -> None:
        await self._whole.add_items(self._own(conversation), self._own_items(items))

    def _own_items(self, items: Sequence[StoredItem]) -> list[StoredItem]:
        return [item._replace(id=self._own(item.id)) for item in items]

    async def items_of(self, conversation: str) -> list[bytes]:
        return await self._whole.items_of(self._own(conversation))

    async def delete_item(self, conversation: str, id: str) -> None:
        await self._whole.delete_item(self._own(conversation), self._own(id))

    def close(self) -> None:
        """Do nothing: the store belongs to all owners."""
